// One memory segment that the ranks of a host map. It is a memfd handed over a unix socket: not limited by the size of
// /dev/shm, and gone with the last process that maps it, even after SIGKILL.
#pragma once

#include <cstddef>

#include "base/deadline.h"
#include "base/fd.h"

namespace cc {

class SharedMemory {
 public:
  SharedMemory() = default;
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  ~SharedMemory();

  // Zeroed by the system; pages are allocated on first touch, by the rank that touches.
  void create(size_t bytes);
  // `bytes`: the size that it must have.
  void adopt(Fd fd, size_t bytes);
  void adopt(Fd fd);  // of any size

  const Fd& fd() const { return fd_; }
  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  // The mapping stays; no further rank can receive it.
  void close_fd() { fd_.reset(); }

 private:
  void map(size_t bytes);
  Fd fd_;
  char* data_ = nullptr;
  size_t bytes_ = 0;
};

void send_fd(int unix_fd, int fd, const Deadline& deadline);
Fd receive_fd(int unix_fd, const Deadline& deadline);

}  // namespace cc
