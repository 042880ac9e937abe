// What a toolchain must be able to compile before it may judge vLLM's code.
#include <hip/hip_bf16.h>
#include <hip/hip_fp8.h>
#include <hip/hip_runtime.h>
#include <thrust/complex.h>

#include <algorithm>
#include <cmath>
#include <optional>

__global__ void probe(const float2* in, __hip_fp8x2_storage_t* out) {
  __shared__ float2 values[64];
  values[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  float2 value = values[63 - threadIdx.x];
  value.x = __shfl_xor(std::exp2(value.x), 1);
  out[threadIdx.x] =
      __hip_cvt_float2_to_fp8x2(value, __HIP_SATFINITE, __HIP_E4M3_FNUZ);
}
