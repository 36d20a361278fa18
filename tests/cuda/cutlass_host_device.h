// What CUTLASS's headers take for granted in device code, for a host compiler. Functions that the
// tests run are real; the others only have to be declared.
#pragma once

#include <cuda_runtime.h>

#include <cmath>

extern thread_local uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

void __syncthreads();
int __syncthreads_and(int value);
void __syncwarp(unsigned mask = ~0u);
template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32);
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32);
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned lanes, int width = 32);
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned lanes, int width = 32);

namespace cutlass::arch {
int LaneId();
int SmId();
}  // namespace cutlass::arch

// CUTLASS offers its sm_90 collectives where it knows nvcc's version.
#define CUTLASS_SM90_COLLECTIVE_BUILDER_SUPPORTED
