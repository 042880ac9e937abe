// See HIPGuard.h.
#pragma once
#define C10_HIP_CHECK(expression) (void)(expression)
#define C10_CUDA_CHECK(expression) (void)(expression)
#define C10_HIP_KERNEL_LAUNCH_CHECK()
#define C10_CUDA_KERNEL_LAUNCH_CHECK()
