// What the machine can do at best, without an engine: `limit THREADS BYTES...`
// prints one JSON document.
//
// The ranks are threads of one process, so all memory is shared and nothing is
// set up, agreed, checked or recorded. An allreduce in place is done in the two
// ways that move the least, and the faster one counts for each size:
//   slots:  each thread copies its values into a slot of its own, tells the
//   others, and sums all slots into its memory; two slots in
//           turn save the meeting at the end
//   slices: each thread sums its slice of everybody's values and writes the sum
//   into everybody's memory, between two meetings

#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum {
  LINE = 64,
  MAX_THREADS = 256,
  ROUNDS = 21,
  LARGE = 64 << 20,
  SPINS = 2000,
  SLOTS_UP_TO = 1 << 20,
  BLOCK = 2048
};
static const double ROUND_S = 0.01;

typedef struct {
  _Alignas(LINE) atomic_long at;
} Line;

static int threads, sizes;
static size_t size_of[64];
static Line arrived[MAX_THREADS];
static float *values[MAX_THREADS], *slots[MAX_THREADS][2], *other[MAX_THREADS];
static double spent[MAX_THREADS];
static pthread_barrier_t barrier;
static double round_trip_ns, copy_gbs, sum_gbs, slots_us[64], slices_us[64];

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

// Until `line` has reached `turn`. With more threads than cores the one that is
// waited for may need this core.
static void until(Line *line, long turn) {
  for (int spins = 0;
       atomic_load_explicit(&line->at, memory_order_acquire) < turn; ++spins) {
    if (spins >= SPINS)
      sched_yield();
  }
}

static void meet(int me, long turn) {
  atomic_store_explicit(&arrived[me].at, turn, memory_order_release);
  for (int each = 0; each < threads; ++each)
    until(&arrived[each], turn);
}

static void sum_into(float *restrict to, const float *restrict from,
                     size_t count) {
  for (size_t i = 0; i < count; ++i)
    to[i] += from[i];
}

static void by_slots(int me, size_t bytes, long turn) {
  const size_t count = bytes / sizeof(float);
  memcpy(slots[me][turn & 1], values[me], bytes);
  meet(me, turn);
  for (int each = 0; each < threads; ++each) {
    if (each != me)
      sum_into(values[me], slots[each][turn & 1], count);
  }
}

static void by_slices(int me, size_t bytes, long turn) {
  const size_t count = bytes / sizeof(float),
               begin = count * (size_t)me / (size_t)threads;
  const size_t end = count * (size_t)(me + 1) / (size_t)threads;
  const int next =
      (me + 1) %
      threads; // the last one that is added, and the first that is written
  meet(me, 2 * turn - 1);
  for (size_t at = begin; at < end; at += BLOCK) {
    const size_t length = end - at < BLOCK ? end - at : BLOCK;
    float *restrict mine = values[me] + at, *restrict theirs =
                                                values[next] + at;
    for (int each = 0; each < threads; ++each) {
      if (each != me && each != next)
        sum_into(mine, values[each] + at, length);
    }
    for (size_t i = 0; i < length; ++i) {
      const float sum = mine[i] + theirs[i];
      mine[i] = sum;
      theirs[i] = sum;
    }
    for (int each = 0; each < threads; ++each) {
      if (each != me && each != next)
        memcpy(values[each] + at, mine, length * sizeof(float));
    }
  }
  meet(me, 2 * turn);
}

static void bounce(int me, size_t unused, long turn) {
  (void)unused;
  if (me == 0)
    atomic_store_explicit(&arrived[0].at, turn, memory_order_release);
  if (me == 1) {
    until(&arrived[0], turn);
    atomic_store_explicit(&arrived[1].at, turn, memory_order_release);
  }
  if (me == 0)
    until(&arrived[1], turn);
}

static void copy(int me, size_t bytes, long turn) {
  (void)turn;
  memcpy(other[me], values[me], bytes);
}

static void sum(int me, size_t bytes, long turn) {
  (void)turn;
  sum_into(other[me], values[me], bytes / sizeof(float));
}

static int ascending(const void *a, const void *b) {
  return (*(const double *)a > *(const double *)b) -
         (*(const double *)a < *(const double *)b);
}

// The median over rounds of the slowest thread's seconds per step.
static double measured(int me, void (*step)(int, size_t, long), size_t bytes) {
  static double rounds[ROUNDS];
  static long calls;
  calls = 1;
  for (int round = -3; round < ROUNDS;
       ++round) { // the first ones find out how many calls fill a round
    if (round == -2 && me == 0)
      calls = 100 * spent[0] < ROUND_S
                  ? 1 + (long)(ROUND_S / (spent[0] + 1e-9) / 10)
                  : 1;
    if (round == -1 && me == 0)
      calls = 1 + (long)(ROUND_S / (spent[0] + 1e-9));
    pthread_barrier_wait(&barrier);
    atomic_store(&arrived[me].at, 0);
    pthread_barrier_wait(&barrier);
    const double begin = now();
    for (long turn = 1; turn <= calls; ++turn)
      step(me, bytes, turn);
    spent[me] = (now() - begin) / (double)calls;
    pthread_barrier_wait(&barrier);
    if (me != 0 || round < 0)
      continue;
    rounds[round] = 0;
    for (int each = 0; each < threads; ++each) {
      if (spent[each] > rounds[round])
        rounds[round] = spent[each];
    }
  }
  if (me == 0)
    qsort(rounds, ROUNDS, sizeof rounds[0], ascending);
  return me == 0 ? rounds[ROUNDS / 2] : 0;
}

// Ends the process where one step on ones does not leave the number of threads
// everywhere.
static void must_be_right(int me, void (*step)(int, size_t, long),
                          size_t bytes) {
  for (size_t i = 0; i < bytes / sizeof(float); ++i)
    values[me][i] = 1;
  atomic_store(&arrived[me].at, 0);
  pthread_barrier_wait(&barrier);
  step(me, bytes, 1);
  for (size_t i = 0; i < bytes / sizeof(float); ++i) {
    if (values[me][i] != (float)threads) {
      fprintf(stderr, "wrong sums of %zu bytes\n", bytes);
      exit(1);
    }
  }
  pthread_barrier_wait(&barrier);
  memset(values[me], 0, bytes); // which no number of sums makes larger
  pthread_barrier_wait(&barrier);
}

static void *rank(void *number) {
  const int me = (int)(long)number;
  cpu_set_t allowed, mine;
  sched_getaffinity(0, sizeof allowed, &allowed);
  int place = me % CPU_COUNT(&allowed), core = 0;
  while (!CPU_ISSET(core, &allowed) || place-- > 0)
    ++core;
  CPU_ZERO(&mine);
  CPU_SET(core, &mine);
  sched_setaffinity(0, sizeof mine, &mine);

  size_t largest = LARGE;
  for (int i = 0; i < sizes; ++i)
    largest = size_of[i] > largest ? size_of[i] : largest;
  float **const blocks[] = {&values[me], &other[me], &slots[me][0],
                            &slots[me][1]};
  for (int i = 0; i < 4; ++i) { // touched here, on this thread's core
    const size_t bytes = i < 2 ? largest : SLOTS_UP_TO;
    if (posix_memalign((void **)blocks[i], 1 << 21, bytes))
      _exit(1);
    memset(*blocks[i], 0, bytes);
  }
  pthread_barrier_wait(&barrier);
  const double trip = measured(me, bounce, 0);
  const double copied = measured(me, copy, LARGE),
               summed = measured(me, sum, LARGE);
  if (me == 0) {
    round_trip_ns = trip * 1e9;
    copy_gbs = 2.0 * LARGE * threads / copied / 1e9;
    sum_gbs = 3.0 * LARGE * threads / summed / 1e9;
  }
  for (int i = 0; i < sizes; ++i) {
    if (size_of[i] <= SLOTS_UP_TO)
      must_be_right(me, by_slots, size_of[i]);
    must_be_right(me, by_slices, size_of[i]);
    const double slotted =
        size_of[i] <= SLOTS_UP_TO ? measured(me, by_slots, size_of[i]) : 1e9;
    const double sliced = measured(me, by_slices, size_of[i]);
    if (me == 0)
      slots_us[i] = slotted * 1e6, slices_us[i] = sliced * 1e6;
  }
  return NULL;
}

int main(int count, char **words) {
  threads = count > 1 ? atoi(words[1]) : 0;
  sizes = count - 2;
  if (threads < 2 || threads > MAX_THREADS || sizes < 0 || sizes > 64) {
    fprintf(stderr, "usage: %s THREADS BYTES... (2 to %d threads, 64 sizes)\n",
            words[0], MAX_THREADS);
    return 2;
  }
  for (int i = 0; i < sizes; ++i)
    size_of[i] = strtoull(words[i + 2], NULL, 10);
  pthread_barrier_init(&barrier, NULL, (unsigned)threads);
  pthread_t started[MAX_THREADS];
  for (long me = 1; me < threads; ++me) {
    if (pthread_create(&started[me], NULL, rank, (void *)me))
      return 1;
  }
  rank((void *)0);
  for (int me = 1; me < threads; ++me)
    pthread_join(started[me], NULL);
  printf("{\"round_trip_ns\": %.1f, \"copy_gbs\": %.3f, \"sum_gbs\": %.3f, "
         "\"allreduce_us\": {",
         round_trip_ns, copy_gbs, sum_gbs);
  for (int i = 0; i < sizes; ++i) {
    printf("%s\"%zu\": %.3f", i ? ", " : "", size_of[i],
           slots_us[i] < slices_us[i] ? slots_us[i] : slices_us[i]);
  }
  puts("}}");
  return 0;
}
