#pragma once
#include <heddle/compress/fine.hpp>
