#include "transport/shm/shared_memory.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>

#include "base/errors.h"
#include "base/wait.h"
#include "transport/shm/layout.h"

// Older C libraries lack the names; the kernel has had them since 3.17.
#ifndef MFD_CLOEXEC
#define MFD_CLOEXEC 0x0001U
#define MFD_ALLOW_SEALING 0x0002U
#endif
#ifndef F_ADD_SEALS
#define F_ADD_SEALS 1033
#define F_SEAL_SEAL 0x0001
#define F_SEAL_SHRINK 0x0002
#define F_SEAL_GROW 0x0004
#endif

namespace cc {
namespace {

template <class Try>
void until_done(int fd, short events, const Deadline& deadline, Try attempt) {
  for (;;) {
    const ssize_t result = attempt();
    if (result > 0) return;
    if (result == 0) throw Failure(Fault::peer_lost, "a rank of this host closed its connection during start");
    if (errno != EAGAIN && errno != EINTR) throw Failure(Fault::internal, system_error("passing shared memory"));
    if (deadline.passed()) throw Failure(Fault::timeout, "a rank of this host did not pass its shared memory in time");
    pollfd waiting{fd, events, 0};
    poll(&waiting, 1, nap_ms);
  }
}

}  // namespace

SharedMemory::~SharedMemory() {
  if (data_) munmap(data_, bytes_);
}

void SharedMemory::create(size_t bytes) {
  fd_ = Fd(static_cast<int>(syscall(SYS_memfd_create, "collective_core", MFD_CLOEXEC | MFD_ALLOW_SEALING)));
  if (!fd_) throw Failure(Fault::internal, system_error("memfd_create"));
  if (ftruncate(fd_.get(), static_cast<off_t>(bytes)) != 0) throw Failure(Fault::internal, system_error("ftruncate"));
  // No rank can shrink the segment under another's feet.
  fcntl(fd_.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  map(bytes);
}

void SharedMemory::adopt(Fd fd, size_t bytes) {
  adopt(std::move(fd));
  if (bytes_ != bytes) {
    throw Failure(Fault::internal, "the ranks of this host disagree on the size of their shared memory");
  }
}

void SharedMemory::adopt(Fd fd) {
  struct stat status{};
  if (fstat(fd.get(), &status) != 0) throw Failure(Fault::internal, system_error("fstat of shared memory"));
  fd_ = std::move(fd);
  map(static_cast<size_t>(status.st_size));
}

void SharedMemory::map(size_t bytes) {
  // Where a large page begins, so that the system can map large pages as such: looked for, and then asked for.
  void* wanted = mmap(nullptr, bytes + large_page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (wanted == MAP_FAILED) {
    wanted = nullptr;
  } else {
    munmap(wanted, bytes + large_page);
    wanted = reinterpret_cast<void*>(round_up(reinterpret_cast<uintptr_t>(wanted), large_page));  // NOLINT
  }
  void* address = mmap(wanted, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
  if (address == MAP_FAILED) throw Failure(Fault::internal, system_error("mmap of shared memory"));
  data_ = static_cast<char*>(address);
  bytes_ = bytes;
  // A forked data loader must not write into it by accident, nor keep its pages alive.
  madvise(address, bytes, MADV_DONTFORK);
  madvise(address, bytes, MADV_DONTDUMP);  // the arena's range is as large as the host's memory
}

void send_fd(int unix_fd, int fd, const Deadline& deadline) {
  char byte = 'M';
  iovec payload{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &payload;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* rights = CMSG_FIRSTHDR(&message);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(rights), &fd, sizeof fd);
  until_done(unix_fd, POLLOUT, deadline, [&] { return sendmsg(unix_fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT); });
}

Fd receive_fd(int unix_fd, const Deadline& deadline) {
  char byte = 0;
  iovec payload{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  until_done(unix_fd, POLLIN, deadline, [&] {
    message = msghdr{};
    message.msg_iov = &payload;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    return recvmsg(unix_fd, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  });
  const cmsghdr* rights = CMSG_FIRSTHDR(&message);
  if (!rights || rights->cmsg_type != SCM_RIGHTS || rights->cmsg_len != CMSG_LEN(sizeof(int))) {
    throw Failure(Fault::internal, "expected shared memory from the first rank of this host");
  }
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(rights), sizeof fd);
  return Fd(fd);
}

}  // namespace cc
