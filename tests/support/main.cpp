// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#include "session.hpp"

int main(int argc, char** argv) { return run_test_cases(argc, argv); }
