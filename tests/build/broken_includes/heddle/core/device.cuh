#pragma once
#include <cuda_runtime.h>
#include <heddle/core/up.hpp>

__global__ void bare() { __shared__ int tile[32]; }
