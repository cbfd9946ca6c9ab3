#pragma once
#include <cuda_runtime.h>
#include <heddle/core/up.hpp>
