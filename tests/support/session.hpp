// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Runs the test cases that the arguments choose. Returns 0 if all passed, else 1, so that a count of failures can't be
// mistaken for the code that means "skipped". Catch2 2.13's runner takes longest to compile of all: session.cpp holds
// it once for every main function.
int run_test_cases(int argc, char** argv);
