// How a rank waits for another rank of its host: spin, then yield, then sleep in a futex.
//
// Spinning answers in well under a microsecond but takes a core; with more ranks than cores the rank that is waited for
// may need that very core, so the spin is short there and the yield hands the core over. Naps are short and end in
// `check`, which throws when a peer died, a failure was announced or the deadline passed: no wait is silent or endless.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace cc {

// A counter in shared memory that one rank raises and others wait for. It counts modulo 2^32; "reached" is decided by
// the sign of the difference, so waiters may lag by up to 2^31.
struct alignas(64) Signal {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> sleepers;  // a killed sleeper leaves it raised, which only costs needless wake calls
};
static_assert(std::atomic<uint32_t>::is_always_lock_free, "signals are shared between processes");

struct WaitPolicy {
  int spins;
  int yields;
};
constexpr WaitPolicy own_core = {4000, 50};    // about 20 us of spinning: longer than a small message takes
constexpr WaitPolicy shared_core = {50, 200};  // more ranks than cores
constexpr long nap_ns = 20 * 1000 * 1000;      // how late a death may be noticed
constexpr int nap_ms = static_cast<int>(nap_ns / 1000000);

inline bool has_reached(const Signal& signal, uint32_t target) {
  return static_cast<int32_t>(signal.value.load(std::memory_order_acquire) - target) >= 0;
}

inline void raise_signal(Signal& signal, uint32_t value) {
  // Sequentially consistent on both sides: either the waiter sees the new value, or we see the sleeper.
  signal.value.store(value, std::memory_order_seq_cst);
  if (signal.sleepers.load(std::memory_order_seq_cst) != 0) {
    syscall(SYS_futex, &signal.value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
}

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

// A hint: this core will write the cache line.
inline void fetch_to_write(const void* line) {
#if defined(__x86_64__)
  __asm__ __volatile__("prefetchw %0" : : "m"(*static_cast<const char*>(line)));  // the builtin needs a newer target
#else
  __builtin_prefetch(line, 1);
#endif
}

template <class Check>
void wait_until(Signal& signal, uint32_t target, const WaitPolicy& policy, Check check) {
  for (int i = 0; i < policy.spins; ++i) {
    if (has_reached(signal, target)) return;
    relax();
  }
  for (int i = 0; i < policy.yields; ++i) {
    if (has_reached(signal, target)) return;
    sched_yield();
  }
  for (;;) {
    signal.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = signal.value.load(std::memory_order_seq_cst);
    if (static_cast<int32_t>(seen - target) < 0) {
      const timespec nap = {0, nap_ns};
      syscall(SYS_futex, &signal.value, FUTEX_WAIT, seen, &nap, nullptr, 0);
    }
    signal.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    if (has_reached(signal, target)) return;
    check();
  }
}

}  // namespace cc
