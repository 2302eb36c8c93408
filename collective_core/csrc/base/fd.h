// File descriptors with an owner.
#pragma once

#include <cstddef>

namespace cc {

// Owns one file descriptor. In a forked child all of them are closed at once: a data loader must not keep a dead rank's
// connections open, or its peers would not see it die.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd);
  Fd(Fd&& other) noexcept : fd_(other.release()) {}
  Fd& operator=(Fd&& other) noexcept;
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  ~Fd() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset();

 private:
  int release() noexcept {
    const int fd = fd_;
    fd_ = -1;
    return fd;
  }
  int fd_ = -1;
};

// Raises this process's own limit, where the system lets it, so that there is room for so many beside the program's.
void allow_descriptors(size_t count);

}  // namespace cc
