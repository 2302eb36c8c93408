// A random program of collectives on a network that misbehaves (faulty_transport.h), or that moves tensors by posted
// buffers and is cut, too (posted_transport.h). Everything follows from the seed:
// what is asked for, in which order by each rank, and the faults; only the threads' pace does not.
//
// Every result must be that of a plain loop over the inputs; a disagreement must have one text on all ranks; and after
// a cut each rank must come to an error that names an end of the connection, and nothing is written any more into
// memory that it got back.
#pragma once

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <numeric>
#include <string>
#include <thread>

#include "algorithms/collectives.h"
#include "engine/engine.h"
#include "kernels/half.h"
#include "tests/faulty_transport.h"
#include "tests/posted_transport.h"

namespace random_program {

constexpr int steps = 200;
constexpr double timeout_s = 30.0;  // of the engine
constexpr double hang_s = 300.0;    // of the whole program

using cc::DType;
using cc::Kind;
using cc::ReduceOp;
using Random = std::mt19937_64;

inline size_t below(Random& random, size_t limit) {
  return std::uniform_int_distribution<size_t>(0, limit - 1)(random);
}

struct Step {
  int number;
  Kind kind;
  DType dtype;
  ReduceOp reduce;
  uint64_t count;
  int root;
  int odd = -1;                   // the rank that asks for something else
  bool among_some = false;        // by the process set
  std::vector<bool> joined = {};  // by rank

  double value(int rank, uint64_t i) const {
    uint64_t mixed = (i + 1) * 0x9E3779B97F4A7C15U + static_cast<uint64_t>(rank * steps + number) * 0xD1B54A32D192ED03U;
    mixed = (mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9U;
    const auto bit = static_cast<double>(mixed >> 63);
    return dtype == DType::boolean ? bit : 1 + bit;
  }
  uint64_t rows(int rank) const { return joined[rank] ? 0 : count / 2 + static_cast<uint64_t>((rank + number) % 3); }
  uint64_t split(int from, int to) const {
    return joined[from] ? 0 : (static_cast<uint64_t>(from + 2 * to + number) % 3) * (count / 3) + from;
  }
};

struct Plan {
  int size, hosts, sockets;
  std::vector<int> some;                 // ranks of the process set
  std::vector<std::vector<Step>> turns;  // what is submitted together
  int64_t until_cut;
  bool posts;    // to the network, instead of sending bytes
  bool by_host;  // how sums are formed
};

inline Plan plan(uint64_t seed) {
  Random random(seed);
  Plan made{};
  made.size = 2 + static_cast<int>(below(random, 5));
  made.hosts = 2 + static_cast<int>(below(random, static_cast<size_t>(made.size - 1)));
  made.sockets = 1 + static_cast<int>(below(random, 2));
  for (int r = 0; r < made.size; ++r) {
    if (below(random, 2)) made.some.push_back(r);
  }
  if (made.some.size() < 2) made.some = {0, made.size - 1};
  made.posts = seed / 2 % 2 == 1;
  made.by_host = seed / 4 % 2 == 1;
  made.until_cut = seed % 2 ? static_cast<int64_t>(below(random, size_t(1) << (8 + below(random, 18)))) : -1;
  std::vector<bool> joined(static_cast<size_t>(made.size));
  int active = made.size;
  constexpr uint64_t longest = 1000003;  // more segments than the window of a ring
  static const uint64_t counts[] = {0, 1, 3, 7, 64, 255, 1031, 4099, 20011, 70001};
  for (int number = 0; number < steps;) {
    if (active == made.size && below(random, 12) == 0) {
      for (size_t r = 0; r < joined.size(); ++r) {
        joined[r] = below(random, 2) && active > 1;
        active -= joined[r] ? 1 : 0;
      }
    }
    std::vector<Step> turn;
    const bool among_some = active == made.size && below(random, 4) == 0;
    for (size_t more = among_some ? 1 : 1 + below(random, 4); more-- > 0;) {
      Step step{number++,
                static_cast<Kind>(below(random, 6)),
                static_cast<DType>(below(random, 13)),
                static_cast<ReduceOp>(below(random, 5)),
                (below(random, 80) ? counts[below(random, std::size(counts))] : longest),
                0};
      step.among_some = among_some;
      step.joined = among_some ? std::vector<bool>(made.some.size()) : joined;
      const int members = static_cast<int>(step.joined.size());
      const int taking_part = among_some ? members : active;
      do step.root = static_cast<int>(below(random, static_cast<size_t>(members)));
      while (step.joined[step.root]);
      const bool divides =
          step.dtype >= DType::f16 && step.dtype <= DType::f64 && (taking_part & (taking_part - 1)) == 0;
      if (step.reduce == ReduceOp::average && !divides) step.reduce = ReduceOp::sum;
      if (step.dtype == DType::boolean && step.reduce < ReduceOp::min) step.reduce = ReduceOp::max;
      const bool one_shape = step.kind == Kind::allreduce || step.kind == Kind::broadcast;
      if (one_shape && taking_part > 1 && below(random, 10) == 0) step.odd = step.root;
      turn.push_back(step);
    }
    made.turns.push_back(turn);
    if (active < made.size && below(random, 3) == 0) {
      Step end{number++, Kind::join, DType::u8, ReduceOp::sum, 0, 0};
      end.joined.assign(joined.size(), false);
      made.turns.push_back({end});
      joined.assign(joined.size(), false);
      active = made.size;
    }
  }
  if (active < made.size) {
    Step end{steps + 9, Kind::join, DType::u8, ReduceOp::sum, 0, 0};
    end.joined.assign(joined.size(), false);
    made.turns.push_back({end});
  }
  Step last{steps + 10, Kind::barrier, DType::u8, ReduceOp::sum, 0, 0};
  last.joined.assign(joined.size(), false);
  made.turns.push_back({last});
  return made;
}

template <class T>
void put(char* at, double value) {
  const T number = static_cast<T>(value);
  std::memcpy(at, &number, sizeof number);
}
inline void store(DType dtype, char* at, double value) {
  switch (dtype) {
    case DType::f16:
      return put<uint16_t>(at, float16_from_float(static_cast<float>(value)));
    case DType::bf16:
      return put<uint16_t>(at, bfloat16_from_float(static_cast<float>(value)));
    case DType::f32:
      return put<float>(at, value);
    case DType::f64:
      return put<double>(at, value);
    default:
      // Small and not negative: the first byte says it, the others are zero.
      std::memset(at, 0, cc::size_of(dtype));
      return put<uint8_t>(at, value);
  }
}

inline double reduced(const Step& step, uint64_t i) {
  double result = 0;
  int number = 0;
  for (int r = 0; r < static_cast<int>(step.joined.size()); ++r) {
    if (step.joined[r]) continue;
    const double value = step.value(r, i);
    if (number++ == 0)
      result = value;
    else if (step.reduce == ReduceOp::min)
      result = std::min(result, value);
    else if (step.reduce == ReduceOp::max)
      result = std::max(result, value);
    else if (step.reduce == ReduceOp::product)
      result *= value;
    else
      result += value;
  }
  return step.reduce == ReduceOp::average ? result / number : result;
}

// An operation under way, and its memory with a margin that nobody may touch.
struct Running {
  static constexpr size_t margin = 64;
  static constexpr char untouched = 0x5A, handed_back = 0x33;
  Step step;
  int rank, size;  // in its set
  cc::Engine* engine;
  std::shared_ptr<cc::Task> task = std::make_shared<cc::Task>();
  std::vector<char> in, out;
  size_t out_bytes = 0;
  bool in_place = false;

  Running(const Step& planned, int own_rank, cc::Engine* runs, Random& random)
      : step(planned), rank(own_rank), size(static_cast<int>(planned.joined.size())), engine(runs) {
    cc::Operation& operation = task->operation;
    cc::Header& header = operation.header;
    header.kind = step.kind;
    header.dtype = step.dtype;
    header.reduce = step.reduce;
    header.root = step.root;
    header.prescale = header.postscale = 1.0;
    if (cc::has_tensor(step.kind)) {
      header.count = step.count + (step.odd == rank ? 1 : 0);
      if (step.kind == Kind::allgather) header.count = step.rows(rank);
      if (step.kind == Kind::alltoall) {
        header.count = 0;
        for (int to = 0; to < size; ++to) operation.splits.push_back(static_cast<int64_t>(step.split(rank, to)));
        for (const int64_t rows : operation.splits) header.count += static_cast<uint64_t>(rows);
      }
      header.ndim = 1;
      header.dims[0] = static_cast<int64_t>(header.count);
    }
    if (step.kind != Kind::join) std::snprintf(header.name, sizeof header.name, "step %d", step.number);
    header.name_hash = cc::hash_of(header.name);
    const size_t one = cc::size_of(step.dtype);
    in.assign(header.bytes() + margin, untouched);
    for (uint64_t i = 0; i < header.count; ++i) store(step.dtype, in.data() + i * one, step.value(rank, i));
    const bool has_output = cc::is_reduction(step.kind) || step.kind == Kind::broadcast;
    in_place = step.kind == Kind::broadcast || (step.kind == Kind::allreduce && below(random, 2));
    if (has_output) {
      out_bytes = step.kind == Kind::reducescatter ? cc::rows_of(step.count, rank, size).length * one : header.bytes();
    }
    out.assign(out_bytes + margin, untouched);
    operation.input = in.data();
    operation.output = !has_output ? nullptr : in_place ? in.data() : out.data();
  }
  // Empty, or what is wrong.
  std::string check() const {
    for (size_t i = 0; i < margin; ++i) {
      if (in[in.size() - 1 - i] != untouched || out[out.size() - 1 - i] != untouched)
        return "memory beyond the tensor was written";
    }
    std::vector<double> want;
    const char* got = in_place ? in.data() : out.data();
    const size_t one = cc::size_of(step.dtype);
    if (step.kind == Kind::allreduce) {
      for (uint64_t i = 0; i < step.count; ++i) want.push_back(reduced(step, i));
    } else if (step.kind == Kind::reducescatter) {
      const cc::Rows mine = cc::rows_of(step.count, rank, size);
      for (uint64_t i = 0; i < mine.length; ++i) want.push_back(reduced(step, mine.begin + i));
    } else if (step.kind == Kind::broadcast) {
      for (uint64_t i = 0; i < step.count; ++i) want.push_back(step.value(step.root, i));
    } else if (step.kind == Kind::allgather || step.kind == Kind::alltoall) {
      got = task->operation.received_bytes();
      for (int from = 0; from < size; ++from) {
        uint64_t begin = 0, length = step.rows(from);
        if (step.kind == Kind::alltoall) {
          for (int to = 0; to < rank; ++to) begin += step.split(from, to);
          length = step.split(from, rank);
        }
        for (uint64_t i = 0; i < length; ++i) want.push_back(step.value(from, begin + i));
      }
      if (task->operation.gathered_bytes != want.size() * one) return "a wrong number of bytes was received";
    }
    char bytes[8];
    for (size_t i = 0; i < want.size(); ++i) {
      store(step.dtype, bytes, want[i]);
      if (std::memcmp(bytes, got + i * one, one) != 0) return "wrong result at element " + std::to_string(i);
    }
    return {};
  }
  void hand_back() {
    std::fill(in.begin(), in.end(), handed_back);
    std::fill(out.begin(), out.end(), handed_back);
  }
  bool was_touched() const {
    const auto is_other = [](char byte) { return byte != handed_back; };
    return std::any_of(in.begin(), in.end(), is_other) || std::any_of(out.begin(), out.end(), is_other);
  }
};

// What one seed has come to.
class Program {
 public:
  explicit Program(uint64_t seed) : seed_(seed), plan_(plan(seed)), said_(steps + 16), at_(16) { faults_.seed = seed; }

  // Returns how many things were wrong.
  int run() {
    std::vector<std::thread> ranks;
    ranks.reserve(static_cast<size_t>(plan_.size));
    for (int r = 0; r < plan_.size; ++r) {
      ranks.emplace_back([this, r] {
        try {
          run_rank(r);
        } catch (const std::exception& error) {
          report(r, std::string("threw: ") + error.what());
        }
        ++ended_;
      });
    }
    const auto begin = std::chrono::steady_clock::now();
    while (ended_ < plan_.size) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      if (std::chrono::steady_clock::now() - begin < std::chrono::duration<double>(hang_s)) continue;
      for (int r = 0; r < plan_.size; ++r) report(r, "hangs in step " + std::to_string(at_[r]));
      std::fflush(stdout);
      _exit(1);
    }
    for (std::thread& rank : ranks) rank.join();
    for (const auto& running : returned_) {
      if (running->was_touched())
        report(running->rank,
               "memory of step " + std::to_string(running->step.number) + " was written after it was handed back");
    }
    return wrong_;
  }
  bool was_cut() const { return faults_.cut_to >= 0; }
  uint64_t operations() const { return operations_; }
  const Faults& faults() const { return faults_; }

 private:
  void report(int rank, const std::string& what) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::printf("seed %llu, rank %d of %d on %d hosts, cut %d-%d: %s\n", static_cast<unsigned long long>(seed_), rank,
                plan_.size, plan_.hosts, faults_.cut_from.load(), faults_.cut_to.load(), what.c_str());
    ++wrong_;
  }

  std::unique_ptr<cc::Engine> engine_of(const std::vector<int>& ranks, int own, PostedNetwork& network) {
    std::vector<cc::Peer> peers;
    int me = 0;
    for (size_t i = 0; i < ranks.size(); ++i) {
      cc::Peer peer;
      peer.rank = static_cast<int>(i);
      peer.global_rank = ranks[i];
      peer.pid = getpid();
      peer.host_id = peer.host_name = "host" + std::to_string(ranks[i] * plan_.hosts / plan_.size);
      if (ranks[i] == own) me = peer.rank;
      peers.push_back(peer);
    }
    std::unique_ptr<cc::Transport> transport;
    if (plan_.posts)
      transport = std::make_unique<PostedTransport>(network, faults_);
    else
      transport = std::make_unique<FaultyTransport>(network, faults_);
    auto group = std::make_unique<cc::Group>(cc::make_topology(me, peers), std::move(transport), timeout_s, timeout_s,
                                             plan_.sockets, nullptr, seed_ / 8 % 2 == 0);
    group->add_by_host(plan_.by_host);
    return std::make_unique<cc::Engine>(std::move(group));
  }

  void run_rank(int rank) {
    std::vector<int> all(static_cast<size_t>(plan_.size));
    std::iota(all.begin(), all.end(), 0);
    const bool is_member = std::find(plan_.some.begin(), plan_.some.end(), rank) != plan_.some.end();
    const auto everyone = engine_of(all, rank, network_);
    const auto some = is_member ? engine_of(plan_.some, rank, network_of_some_) : nullptr;
    Random random(seed_ * 31 + static_cast<uint64_t>(rank));
    if (++begun_ == plan_.size) {
      faults_.until_cut = plan_.until_cut;
      faults_.armed = true;
    }
    while (begun_ < plan_.size) std::this_thread::yield();
    std::optional<cc::Failure> failure;
    bool has_joined = false;
    std::shared_ptr<cc::Task> join;
    for (const std::vector<Step>& turn : plan_.turns) {
      if (failure) break;
      std::vector<std::unique_ptr<Running>> under_way;
      const Step& first = turn.front();
      at_[rank] = first.number;
      if (first.among_some && !is_member) continue;
      if (!first.among_some && first.joined[rank]) {
        if (!has_joined) {
          join = std::make_shared<cc::Task>();
          join->operation.header.kind = Kind::join;
          join->operation.header.name_hash = cc::hash_of("");
          join->operation.header.prescale = join->operation.header.postscale = 1.0;
          everyone->submit(join);
          has_joined = true;
        }
        continue;
      }
      if (first.kind == Kind::join && has_joined) {
        while (!everyone->wait(*join, 0.05)) continue;
        if (!join->error.empty()) failure = judge(rank, *join, "join", false);
        has_joined = false;
        continue;
      }
      cc::Engine* engine = first.among_some ? some.get() : everyone.get();
      under_way.reserve(turn.size());
      for (const Step& step : turn) {
        under_way.push_back(std::make_unique<Running>(step, engine->topology().rank, engine, random));
      }
      std::shuffle(under_way.begin(), under_way.end(), random);
      const bool blocking = under_way.size() == 1 && below(random, 2);
      for (const auto& one : under_way) {
        if (blocking)
          engine->run(one->task);
        else
          engine->submit(one->task);
      }
      for (const auto& one : under_way) {
        while (!blocking && !engine->wait(*one->task, 0.05)) continue;
        ++operations_;
        const auto number = static_cast<size_t>(one->step.number);
        const std::string name = "step " + std::to_string(number) + " (" + cc::name_of(one->step.kind) + ")";
        cc::Task& task = *one->task;
        if (task.fault == cc::Fault::mismatch && one->step.odd >= 0) {
          const std::lock_guard<std::mutex> lock(said_mutex_);
          // Before it each rank names what it has asked for itself.
          const std::string why = task.error.substr(std::min(task.error.find(": "), task.error.size()));
          if (said_[number].empty()) said_[number] = why;
          if (said_[number] != why) report(rank, name + " is explained differently: " + task.error);
        } else if (!task.error.empty()) {
          const auto why = judge(rank, task, name, first.among_some);
          if (!failure) failure = why;
        } else if (one->step.odd >= 0) {
          report(rank, name + ": a disagreement was not noticed");
        } else {
          const std::string wrong = one->check();
          if (!wrong.empty()) report(rank, std::string(name).append(": ").append(wrong));
        }
        one->hand_back();
      }
      if (failure && network_.in_use(rank) + network_of_some_.in_use(rank) > 0)
        report(rank, "the network still has memory of an operation that has failed");
      const std::lock_guard<std::mutex> lock(mutex_);
      if (failure) {
        for (auto& one : under_way) returned_.push_back(std::move(one));
      }
    }
    if (!failure) return;
    for (cc::Engine* engine : {everyone.get(), some.get()}) {
      if (!engine) continue;
      engine->end();
      engine->leave_because(*failure);
    }
  }

  // Of an error that is no disagreement: whether it is that of the cut.
  cc::Failure judge(int rank, const cc::Task& task, const std::string& name, bool of_some) {
    const auto is_end = [&](int one) { return one == faults_.cut_from || one == faults_.cut_to; };
    // An end that is no member of the process set has no number in it.
    const bool names_it = (of_some || !task.ranks.empty()) && std::all_of(task.ranks.begin(), task.ranks.end(), is_end);
    const auto is_said = [&](int one) {
      return task.error.find("rank " + std::to_string(one) + " (host") != std::string::npos;
    };
    const bool in_words = names_it && (is_said(faults_.cut_from) || is_said(faults_.cut_to));
    if (!was_cut() || !in_words || task.fault != cc::Fault::peer_lost) {
      std::string ranks;
      for (const int one : task.ranks) ranks += " " + std::to_string(one);
      report(rank, name + ": fault " + std::to_string(static_cast<int>(task.fault)) + " of ranks" + ranks + ": " +
                       task.error);
    }
    return {task.fault, task.error, task.ranks};
  }

  const uint64_t seed_;
  const Plan plan_;
  Faults faults_;
  PostedNetwork network_{seed_}, network_of_some_{seed_ + 1};
  std::atomic<int> begun_{0}, ended_{0};
  std::atomic<uint64_t> operations_{0};
  std::mutex mutex_, said_mutex_;
  std::vector<std::string> said_;
  std::vector<std::atomic<int>> at_;  // the step that each rank has come to
  std::vector<std::unique_ptr<Running>> returned_;
  int wrong_ = 0;
};

// Seed after seed for so many seconds, at least one. Returns the number of things that were wrong.
inline int run_for(double seconds, uint64_t first_seed) {
  const auto begin = std::chrono::steady_clock::now();
  uint64_t seed = first_seed, operations = 0, cuts = 0, delays = 0, parts = 0, registered = 0, copied = 0;
  int wrong = 0;
  do {
    Program program(seed++);
    wrong += program.run();
    operations += program.operations();
    cuts += program.was_cut() ? 1 : 0;
    delays += program.faults().delays;
    parts += program.faults().parts;
    registered += program.faults().registered;
    copied += program.faults().copied;
  } while (std::chrono::steady_clock::now() - begin < std::chrono::duration<double>(seconds));
  std::printf(
      "faults: seeds %llu to %llu, %llu operations, %llu cuts, %llu delays, %llu short parts, "
      "%llu registered and %llu copied bodies, %d failures\n",
      static_cast<unsigned long long>(first_seed), static_cast<unsigned long long>(seed - 1),
      static_cast<unsigned long long>(operations), static_cast<unsigned long long>(cuts),
      static_cast<unsigned long long>(delays), static_cast<unsigned long long>(parts),
      static_cast<unsigned long long>(registered), static_cast<unsigned long long>(copied), wrong);
  return wrong;
}

}  // namespace random_program
