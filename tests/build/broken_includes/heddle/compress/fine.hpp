#pragma once
#include <heddle/core/up.hpp>
#include <vector>
