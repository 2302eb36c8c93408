// SHA-256 (FIPS 180-4) and HMAC-SHA256 (RFC 2104). Ours, so that the engine links no cryptographic library; used only
// for the few hundred bytes of a handshake, so plain rather than fast.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace cc {

using Digest = std::array<uint8_t, 32>;

Digest sha256(const std::string& bytes);
Digest hmac_sha256(const std::string& key, const std::string& message);
// In time that does not depend on where the first difference lies.
bool equal_constant_time(const Digest& a, const Digest& b);

}  // namespace cc
