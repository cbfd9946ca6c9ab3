// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

#include <heddle/memory/host_resource.hpp>

#include "conformance.hpp"

TEST_CASE("host_resource conforms", "[memory]") {
  heddle_test::conforms_to_resource([] { return heddle::host_resource{}; });
}
