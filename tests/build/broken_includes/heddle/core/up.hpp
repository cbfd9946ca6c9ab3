#pragma once
#include <heddle/optim/sideways.hpp>
#include <cuda_runtime.h>
#include "heddle/core/device.cuh"
#include <heddle/core/device.cuh>
#include <heddle/core/missing.hpp>
