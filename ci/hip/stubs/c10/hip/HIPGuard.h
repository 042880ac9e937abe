// In the place of PyTorch's header, which only its ROCm builds have. Only device
// code is compiled, so nothing here has to work; it has to have the right names.
#pragma once
#include <c10/core/Device.h>
#include <hip/hip_runtime.h>

namespace c10::hip {

struct HIPStream {
  operator hipStream_t() const { return nullptr; }
  hipStream_t stream() const { return nullptr; }
};

struct OptionalHIPGuardMasqueradingAsCUDA {
  template <class T>
  explicit OptionalHIPGuardMasqueradingAsCUDA(T&&) {}
};

using HIPGuard = OptionalHIPGuardMasqueradingAsCUDA;
using OptionalHIPGuard = OptionalHIPGuardMasqueradingAsCUDA;

inline HIPStream getCurrentHIPStream(int = -1) { return {}; }
inline HIPStream getCurrentCUDAStream(int = -1) { return {}; }

}  // namespace c10::hip

namespace c10::cuda {
using namespace c10::hip;
using CUDAGuard = c10::hip::HIPGuard;
using OptionalCUDAGuard = c10::hip::OptionalHIPGuard;
}  // namespace c10::cuda

namespace at::cuda {
using namespace c10::cuda;
}  // namespace at::cuda

namespace at::hip {
using namespace c10::hip;
}  // namespace at::hip
