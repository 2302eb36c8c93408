// Every interleaving of small programs on three ranks, through the code that decides in production which operation runs
// next: Negotiation, compare, disagreement and JoinedRanks. What is here instead of the engine's is what those do not
// decide: the queue, the exchange (who has published, who reads), the data phase, deaths.
//
// Programs: three operations per rank in all orders, submitted together or waited for one by one, with a join after any
// of them, with an operation that differs on one rank, and with the death of a rank at any moment. Checked in every
// state: no operation runs whose headers differ, one that all ask for alike runs, all ranks come to one verdict on an
// exchange, and exchanges come to an end; at the end of every path: each operation has a result, the disagreement that
// it must have, or a failure where a rank has died.
//
// collective_core_explorer [all | MUTANT]: every program rather than a choice of them; or decisions spoilt in a way
// that must be found. Prints the number of states; for a violation the shortest trace to it, and ends with 1.
#include <algorithm>
#include <array>
#include <cstdio>
#include <deque>
#include <functional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/topology.h"
#include "negotiation/join.h"
#include "negotiation/negotiation.h"

namespace {

using cc::Blocked;
using cc::Header;
using cc::Kind;
using cc::Step;
using cc::Verdict;

constexpr int ranks = 3;
constexpr int max_requests = 4;    // of a rank: three operations and a join
constexpr int max_exchanges = 24;  // of a program: twice what the longest of them needs

const char* const mutants[] = {
    "blind",      // takes operations of different sizes for the same
    "forgetful",  // does not know what it has tried
    "mute",       // does not say that its callers wait
    "absent",     // ends its join as soon as the others agree on something
    "selfish",    // rank 2 believes that its own operation goes first
    "impatient",  // asks again before the operation that the others want is there
    "touchy",     // rank 1 takes another order for a disagreement
};
std::string mutant;

// ------------------------------------------------------------------------------------------------ what is asked for

enum class Do : uint8_t { submit, wait, run };
struct Action {
  Do what;
  uint8_t request;
};

struct Program {
  std::string text;  // for people
  std::array<std::vector<Header>, ranks> requests;
  std::array<std::vector<Action>, ranks> actions;
  bool travels_inline = true;  // with the headers; otherwise a data phase waits for all ranks
  bool someone_dies = false;
  bool may_disagree = false;  // about anything, because callers wait for different things
  std::string disagreed;      // names on which the ranks must disagree
};

Header header_of(const std::string& name, Kind kind = Kind::allreduce) {
  Header header{};
  header.kind = kind;
  header.dtype = cc::DType::f32;
  header.ndim = kind == Kind::join ? 0 : 1;
  header.count = kind == Kind::join ? 0 : 4;
  header.dims[0] = static_cast<int64_t>(header.count);
  header.prescale = header.postscale = 1.0;
  std::snprintf(header.name, sizeof header.name, "%s", name.c_str());
  header.name_hash = cc::hash_of(name.c_str());
  return header;
}

// Byte by byte: on purpose nothing that production compares with.
bool asks_alike(const Header& a, const Header& b) {
  const char* begin = reinterpret_cast<const char*>(&a);
  return std::equal(begin, begin + sizeof a, reinterpret_cast<const char*>(&b));
}

// ------------------------------------------------------------------------------------------------------- one moment

constexpr uint8_t none = 0xFF;
enum class Phase : uint8_t { idle, asks, exchanges, proposes, transfers, gone };
enum class Outcome : uint8_t { open, result, disagreement, failure };

struct Plain {
  Phase phase = Phase::idle;
  uint8_t action = 0;        // the next one of its program
  uint8_t awaited = none;    // what the caller waits for
  uint8_t in_caller = none;  // what runs in the caller's own thread
  uint8_t came_with = none;
  uint8_t sequence = 0;     // of its latest exchange
  uint8_t transferred = 0;  // the exchange whose data phase it has come to
  bool stopped = false;     // after a failure
  uint8_t last_joined = none;
  std::array<uint8_t, max_requests> queue{none, none, none, none};
  std::array<Outcome, max_requests> outcomes{};
  struct Published {
    uint8_t request = none;
    Blocked blocked = Blocked::no;
  };
  std::array<Published, 2> slots{};  // by the parity of the sequence
};

struct Rank {
  Plain plain;
  cc::Negotiation negotiation{nullptr};
  cc::JoinedRanks joined{ranks};
};

struct World {
  std::array<Rank, ranks> rank;
  std::array<uint8_t, 2> verdicts{};  // of the exchanges whose headers are in the slots; 0: not known yet
  bool someone_died = false;
};

enum class Event : uint8_t { acts, begins, publishes, reads, proposes, transfers, dies, notices };
const char* const event_names[] = {"acts",     "begins",          "publishes", "reads the headers",
                                   "proposes", "ends a transfer", "dies",      "notices the death"};
struct Move {
  Event event;
  uint8_t rank;
};

class Explorer {
 public:
  explicit Explorer(const Program& program) : program_(program) {}

  // Returns the number of states, or 0 after a violation, whose trace it prints. States are told apart by 64 bits:
  // among the thousands of a program no two are likely to share them.
  size_t run() {
    std::unordered_set<size_t> known;
    struct Reached {
      size_t from;
      Move by;
    };
    std::vector<Reached> reached{{0, {}}};
    std::deque<World> frontier(1);
    known.insert(hash_of(frontier.front()));
    for (size_t at = 0; !frontier.empty(); ++at) {
      const World world = std::move(frontier.front());
      frontier.pop_front();
      size_t last = at;
      bool moved = false;
      for (uint8_t r = 0; r < ranks; ++r) {
        for (const Event event : possible(world, r)) {
          World next = world;
          if (!wrong_.empty() || !apply(&next, {event, r})) continue;
          moved = moved || event != Event::dies;
          if (!known.insert(hash_of(next)).second && wrong_.empty()) continue;
          last = reached.size();
          reached.push_back({at, {event, r}});
          frontier.push_back(std::move(next));
        }
      }
      if (!moved) check_end(world);
      if (wrong_.empty()) continue;
      std::vector<Move> trace;
      for (; last > 0; last = reached[last].from) trace.push_back(reached[last].by);
      std::reverse(trace.begin(), trace.end());
      print(trace);
      return 0;
    }
    return reached.size();
  }

 private:
  const Header& header(int rank, uint8_t request) const { return program_.requests[rank][request]; }
  uint8_t request_of(int rank, const Header* one) const {
    return one ? static_cast<uint8_t>(one - program_.requests[rank].data()) : none;
  }
  void wrong(const std::string& what) {
    if (wrong_.empty()) wrong_ = what;
  }

  size_t hash_of(const World& world) {
    std::string& key = key_;
    key.clear();
    for (int r = 0; r < ranks; ++r) {
      const Rank& rank = world.rank[r];
      key.append(reinterpret_cast<const char*>(&rank.plain), sizeof rank.plain);
      const cc::Negotiation& negotiation = rank.negotiation;
      uint8_t tried = 0;
      for (const Header* one : negotiation.tried) tried = static_cast<uint8_t>(tried | 1 << request_of(r, one));
      key += {static_cast<char>(request_of(r, negotiation.mine)),
              static_cast<char>(negotiation.blocked),
              static_cast<char>(tried),
              static_cast<char>(negotiation.agreement.verdict),
              static_cast<char>(negotiation.agreement.first),
              static_cast<char>(negotiation.decides)};
      cc::JoinedRanks joined = rank.joined;
      key += static_cast<char>(joined.take_last());
    }
    key.append(reinterpret_cast<const char*>(world.verdicts.data()), world.verdicts.size());
    key += static_cast<char>(world.someone_died);
    return std::hash<std::string>()(key);
  }

  // What a rank may do next; whether its caller or a proposal has what it needs is found out by trying.
  std::vector<Event> possible(const World& world, int r) const {
    const Plain& plain = world.rank[r].plain;
    if (plain.phase == Phase::gone) return {};
    std::vector<Event> events;
    if (plain.in_caller == none) events.push_back(Event::acts);
    bool waits = false;
    switch (plain.phase) {
      case Phase::idle:
        if (plain.queue[0] != none) events.push_back(Event::begins);
        break;
      case Phase::asks:
        events.push_back(Event::publishes);
        break;
      case Phase::exchanges:
        waits = !all_have(world, &Plain::sequence, plain.sequence);
        if (!waits) events.push_back(Event::reads);
        break;
      case Phase::proposes:
        waits = true;
        events.push_back(Event::proposes);
        break;
      case Phase::transfers:
        waits = !all_have(world, &Plain::transferred, plain.sequence);
        if (!waits) events.push_back(Event::transfers);
        break;
      case Phase::gone:
        break;
    }
    if (waits && world.someone_died) events.push_back(Event::notices);
    if (program_.someone_dies && !world.someone_died) events.push_back(Event::dies);
    return events;
  }

  // False: it cannot happen yet. Otherwise `world` is what it leads to.
  bool apply(World* world, const Move& move) {
    Rank& rank = world->rank[move.rank];
    switch (move.event) {
      case Event::acts:
        return act(move.rank, rank);
      case Event::begins:
        begin(rank, move.rank, first_in_queue(move.rank, rank.plain));
        return true;
      case Event::publishes:
        publish(*world, move.rank);
        return true;
      case Event::reads:
        read(*world, move.rank);
        return true;
      case Event::proposes:
        return propose(move.rank, rank);
      case Event::transfers:
        end_transfer(rank, move.rank);
        return true;
      case Event::dies:
        world->someone_died = true;
        rank.plain.phase = Phase::gone;
        return true;
      case Event::notices:
        rank.plain.stopped = true;
        conclude(rank, move.rank, Outcome::failure);
        return true;
    }
    return false;
  }

  static bool all_have(const World& world, uint8_t Plain::* what, uint8_t sequence) {
    return std::all_of(world.rank.begin(), world.rank.end(),
                       [&](const Rank& rank) { return rank.plain.*what >= sequence; });
  }

  // The caller's thread.
  bool act(int r, Rank& rank) {
    Plain& plain = rank.plain;
    if (plain.in_caller != none) return false;
    if (plain.awaited != none) {
      if (plain.outcomes[plain.awaited] == Outcome::open) return false;
      plain.awaited = none;
    }
    if (plain.action == program_.actions[r].size()) return false;
    const Action action = program_.actions[r][plain.action++];
    const bool at_once = plain.phase == Phase::idle && plain.queue[0] == none && !cc::joins(header(r, action.request));
    if (action.what == Do::run && at_once) {
      plain.in_caller = plain.awaited = action.request;
      begin(rank, r, action.request);
      return true;
    }
    if (action.what != Do::wait) *std::find(plain.queue.begin(), plain.queue.end(), none) = action.request;
    if (action.what != Do::submit) plain.awaited = action.request;
    return true;
  }

  uint8_t first_in_queue(int r, const Plain& plain) const {
    for (const uint8_t one : plain.queue) {
      if (one != none && !cc::joins(header(r, one))) return one;
    }
    return plain.queue[0];
  }

  void begin(Rank& rank, int r, uint8_t request) {
    rank.plain.came_with = request;
    rank.negotiation = cc::Negotiation(&header(r, request));
    if (rank.plain.stopped) return conclude(rank, r, Outcome::failure);
    rank.plain.phase = Phase::asks;
  }

  void publish(World& world, int r) {
    Plain& plain = world.rank[r].plain;
    const uint8_t mine = request_of(r, world.rank[r].negotiation.mine);
    const bool nothing_else = plain.queue[0] == none || (plain.queue[0] == mine && plain.queue[1] == none);
    const bool only_one = plain.awaited == mine && nothing_else;
    const Blocked blocked = mutant == "mute" ? Blocked::no : world.rank[r].negotiation.says(only_one);
    if (++plain.sequence > max_exchanges) wrong("the exchanges do not come to an end");
    plain.slots[plain.sequence % 2] = {mine, blocked};
    if (std::none_of(world.rank.begin(), world.rank.end(), [&](const Rank& other) {
          return &other.plain != &plain && other.plain.sequence >= plain.sequence;
        }))
      world.verdicts[plain.sequence % 2] = 0;
    plain.phase = Phase::exchanges;
  }

  void read(World& world, int r) {
    Rank& rank = world.rank[r];
    Plain& plain = rank.plain;
    const size_t parity = plain.sequence % 2;
    std::array<Header, ranks> slots;
    std::vector<const Header*> headers;
    const Header* first_active = nullptr;
    bool alike = true, any_joined = false;
    for (int other = 0; other < ranks; ++other) {
      const Plain::Published& published = world.rank[other].plain.slots[parity];
      const Header& asked = header(other, published.request);
      slots[other] = asked;
      slots[other].blocked = published.blocked;
      headers.push_back(&slots[other]);
      any_joined = any_joined || cc::joins(asked);
      if (cc::joins(asked)) continue;
      if (!first_active) first_active = &asked;
      alike = alike && asks_alike(*first_active, asked) && !asked.unsupported;
    }
    const bool root_joined =
        first_active && first_active->kind == Kind::broadcast && cc::joins(*headers[first_active->root]);
    alike = alike && !(first_active && ((first_active->whole && any_joined) || root_joined));
    if (mutant == "blind") {
      for (Header& slot : slots) slot.count = 4, slot.dims[0] = 4;
    }
    const int contributors = rank.joined.update(headers);
    Step step = rank.negotiation.after(headers, r);
    if (mutant == "absent" && step == Step::run_as_joined) step = Step::run;
    if (mutant == "touchy" && r == 1 && step == Step::reorder) step = Step::fail;
    if (mutant == "selfish" && r == 2) rank.negotiation.wanted = headers[2]->name_hash;

    const bool agreed = step == Step::run || step == Step::run_as_joined;
    const bool stands_in = cc::joins(*headers[r]) && contributors > 0;
    const std::string exchange = "exchange " + std::to_string(plain.sequence);
    if (agreed && !alike) wrong(exchange + " lets operations run that differ");
    if (!agreed && alike && first_active) wrong(exchange + ": all ask for the same, and it does not run");
    if (step != Step::reorder && stands_in != (step == Step::run_as_joined || step == Step::stay_joined))
      wrong(exchange + ": a rank that has joined does not stay so, or another does");
    const Verdict verdict = agreed ? Verdict::agreed : step == Step::reorder ? Verdict::reorder : Verdict::disagreed;
    const auto code = static_cast<uint8_t>(1 + static_cast<int>(verdict) * ranks + rank.negotiation.agreement.first);
    if (world.verdicts[parity] != 0 && world.verdicts[parity] != code)
      wrong(exchange + ": the ranks come to different verdicts");
    world.verdicts[parity] = code;

    if (step == Step::fail) {
      const cc::Failure failure = cc::disagreement(headers, topology(), r, rank.negotiation.agreement.one_name);
      if (failure.ranks.empty()) wrong(exchange + ": a disagreement that names no rank");
      conclude(rank, r, Outcome::disagreement);
    } else if (agreed) {
      if (cc::joins(*headers[r]) && !stands_in) plain.last_joined = static_cast<uint8_t>(rank.joined.take_last());
      plain.transferred = plain.sequence;
      plain.phase = Phase::transfers;
      if (program_.travels_inline) end_transfer(rank, r);
    } else {
      plain.phase = Phase::proposes;
    }
  }

  void end_transfer(Rank& rank, int r) {
    if (cc::joins(*rank.negotiation.mine) && rank.plain.last_joined == none)
      rank.plain.phase = Phase::proposes;
    else
      conclude(rank, r, Outcome::result);
  }

  bool propose(int r, Rank& rank) {
    Plain& plain = rank.plain;
    const auto submission = [&](uint8_t one) { return cc::Submission{&header(r, one), plain.awaited == one}; };
    std::vector<cc::Submission> submitted{submission(plain.came_with)};
    for (const uint8_t one : plain.queue) {
      if (one != none && one != plain.came_with) submitted.push_back(submission(one));
    }
    if (mutant == "forgetful") rank.negotiation.tried.clear();
    const bool found = rank.negotiation.propose(submitted, false, [] { return true; });  // its one caller does
    if (!found && mutant != "impatient") return false;
    plain.phase = Phase::asks;
    return true;
  }

  // What it has run or tried to.
  void conclude(Rank& rank, int r, Outcome outcome) {
    Plain& plain = rank.plain;
    const uint8_t request = request_of(r, rank.negotiation.mine);
    plain.outcomes[request] = outcome;
    const auto queued = std::find(plain.queue.begin(), plain.queue.end(), request);
    if (queued != plain.queue.end()) {
      std::rotate(queued, queued + 1, plain.queue.end());
      plain.queue.back() = none;
    }
    rank.negotiation = cc::Negotiation(nullptr);
    plain.came_with = none;
    plain.phase = Phase::idle;
    if (plain.in_caller == none) return;
    if (plain.outcomes[plain.in_caller] == Outcome::open) return begin(rank, r, plain.in_caller);
    plain.in_caller = none;
  }

  // Where nothing can happen any more, but perhaps a death.
  void check_end(const World& world) {
    for (int r = 0; r < ranks; ++r) {
      const Plain& plain = world.rank[r].plain;
      if (plain.phase == Phase::gone) continue;
      const std::string who = "rank " + std::to_string(r);
      for (size_t request = 0; request < program_.requests[r].size(); ++request) {
        const Header& asked = program_.requests[r][request];
        const Outcome outcome = plain.outcomes[request];
        const std::string what = who + ", '" + asked.name + "': ";
        const bool must_disagree = asked.name[0] && program_.disagreed.find(asked.name) != std::string::npos;
        if (outcome == Outcome::open) wrong(what + "it never ends");
        if (outcome == Outcome::failure && !world.someone_died) wrong(what + "a failure, and nobody has died");
        if (outcome == Outcome::disagreement && !program_.may_disagree && !must_disagree)
          wrong(what + "a disagreement about what all ask for");
        if (outcome == Outcome::result && must_disagree) wrong(what + "a result, where the ranks differ");
        const bool all_joined = cc::joins(asked) && outcome == Outcome::result;
        for (const Rank& other : world.rank) {
          if (all_joined && other.plain.phase != Phase::gone && other.plain.last_joined != plain.last_joined)
            wrong(what + "the ranks do not agree on who joined last");
        }
      }
    }
  }

  static const cc::Topology& topology() {
    static const cc::Topology made = [] {
      std::vector<cc::Peer> peers(ranks);
      for (int r = 0; r < ranks; ++r) peers[r].rank = peers[r].global_rank = r;
      return cc::make_topology(0, peers);
    }();
    return made;
  }

  void print(const std::vector<Move>& trace) {
    const std::string found = std::exchange(wrong_, {});
    std::printf("violation: %s\n  in the program %s\n", found.c_str(), program_.text.c_str());
    World world;
    for (const Move& move : trace) {
      const Plain before = world.rank[move.rank].plain;
      apply(&world, move);
      const Rank& rank = world.rank[move.rank];
      std::printf("  rank %d %s", move.rank, event_names[static_cast<int>(move.event)]);
      if (move.event == Event::acts) {
        const Action action = program_.actions[move.rank][before.action];
        static const char* const names[] = {"submits", "waits for", "runs"};
        std::printf(": %s '%s'", names[static_cast<int>(action.what)], header(move.rank, action.request).name);
      }
      if (move.event == Event::publishes) {
        const Plain::Published& said = rank.plain.slots[rank.plain.sequence % 2];
        static const char* const blocked[] = {"", ", and waits", ", and has tried all"};
        std::printf(" in exchange %d: '%s'%s", rank.plain.sequence, header(move.rank, said.request).name,
                    blocked[static_cast<int>(said.blocked)]);
      }
      std::printf("\n");
    }
  }

  const Program& program_;
  std::string wrong_, key_;
};

// ------------------------------------------------------------------------------------------------- all the programs

constexpr int never = 4;

// In what order a rank asks, whether it waits for each before the next, and after how many of them it joins.
struct Plan {
  std::string order;
  bool one_by_one = false;
  int until_join = never;
};
using Plans = std::array<Plan, ranks>;

bool have_one_order(const Plans& plans) {
  return plans[1].order == plans[0].order && plans[2].order == plans[0].order;
}

// `change`: of what a rank asks for.
template <class Change>
Program program_of(const Plans& plans, const Change& change) {
  Program made;
  for (int r = 0; r < ranks; ++r) {
    const Plan& plan = plans[r];
    std::vector<Action> waits;
    const auto ask = [&](Header header) {
      change(r, &header);
      const auto request = static_cast<uint8_t>(made.requests[r].size());
      made.requests[r].push_back(header);
      made.actions[r].push_back({plan.one_by_one ? Do::run : Do::submit, request});
      if (!plan.one_by_one) waits.push_back({Do::wait, request});
    };
    const std::string order = plan.order.substr(0, static_cast<size_t>(plan.until_join));
    for (const char name : order) ask(header_of(std::string(1, name)));
    if (plan.until_join != never) ask(header_of("", Kind::join));
    made.actions[r].insert(made.actions[r].end(), waits.begin(), waits.end());
    made.text +=
        (r ? ", " : "") + order + (plan.until_join == never ? "" : " join") + (plan.one_by_one ? " one by one" : "");
    made.may_disagree = made.may_disagree || (plan.one_by_one && !have_one_order(plans));
  }
  return made;
}
Program program_of(const Plans& plans) {
  return program_of(plans, [](int /*rank*/, Header* /*header*/) {});
}

// Of the operations: names are exchangeable, so rank 0's order is the first. Without `all`, two of the 36.
std::vector<Plans> all_orders(bool all) {
  std::vector<Plans> found;
  std::string second = "abc";
  do {
    std::string third = "abc";
    do {
      if (all || second + third == "abcabc" || second + third == "bcacab")
        found.push_back({Plan{"abc"}, Plan{second}, Plan{third}});
    } while (std::next_permutation(third.begin(), third.end()));
  } while (std::next_permutation(second.begin(), second.end()));
  return found;
}

class Programs {
 public:
  explicit Programs(bool all) : all_(all) {
    // All orders, together and one by one.
    for (Plans plans : all_orders(true)) {
      for (int mask = 0; mask < 1 << ranks; ++mask) {
        for (int r = 0; r < ranks; ++r) plans[r].one_by_one = (mask >> r & 1) != 0;
        add(program_of(plans));
      }
    }
    for (Plans plans : all_orders(all_)) {
      for (const bool one_by_one : {false, true}) {
        for (Plan& plan : plans) plan.one_by_one = one_by_one;
        add_deaths(plans);
        add_joins(plans);
        add_differences(plans);
      }
    }
  }
  const std::vector<Program>& get() const { return programs_; }

 private:
  void add(const Program& program) { programs_.push_back(program); }

  void add_deaths(const Plans& plans) {
    Program program = program_of(plans);
    program.someone_dies = true;
    program.travels_inline = false;
    program.text += ", a death";
    add(program);
  }

  void add_joins(Plans plans) {
    if (!all_ && plans[0].one_by_one && !have_one_order(plans)) return;
    for (int until = 0; until < 64; ++until) {
      bool is_chosen = true;
      for (int r = 0; r < ranks; ++r) {
        plans[r].until_join = until >> 2 * r & 3;
        is_chosen = is_chosen && (all_ || plans[r].until_join != 2);
      }
      if (!is_chosen) continue;
      add(program_of(plans));
      if (all_ || (have_one_order(plans) && !plans[0].one_by_one)) add_needs(plans);
    }
    for (Plan& plan : plans) plan.until_join = 0;
    // No user can do that with one build: the exchange would have no end.
    Program odd = program_of(plans, [](int rank, Header* header) { header->name_hash += static_cast<uint64_t>(rank); });
    odd.may_disagree = true;
    add(odd);
  }

  // `b` is to be done by all ranks, or needs rank 1's data.
  void add_needs(const Plans& plans) {
    bool some_ask = false, all_ask = true, root_asks = false;
    for (int r = 0; r < ranks; ++r) {
      const bool asks = plans[r].order.find('b') < static_cast<size_t>(plans[r].until_join);
      some_ask = some_ask || asks;
      all_ask = all_ask && asks;
      root_asks = root_asks || (asks && r == 1);
    }
    Program whole = program_of(plans, [](int /*rank*/, Header* header) { header->whole = header->name[0] == 'b'; });
    whole.text += ", 'b' not without any rank";
    if (some_ask && !all_ask) whole.disagreed = "b";
    add(whole);
    Program rooted = program_of(plans, [](int /*rank*/, Header* header) {
      if (header->name[0] == 'b') header->kind = Kind::broadcast;
      header->root = header->kind == Kind::broadcast ? 1 : 0;
    });
    rooted.text += ", 'b' from rank 1";
    if (some_ask && !root_asks) rooted.disagreed = "b";
    add(rooted);
  }

  // One rank's `b` is another operation.
  void add_differences(const Plans& plans) {
    for (int odd = 0; odd < ranks; ++odd) {
      for (int what = 0; what < 8; ++what) {
        Program program = program_of(plans, [&](int rank, Header* header) {
          if (rank == odd && header->name[0] == 'b') make_odd(what, header);
        });
        program.disagreed = "bd";
        program.text += ", another 'b' on rank " + std::to_string(odd);
        add(program);
      }
    }
  }
  static void make_odd(int what, Header* header) {
    switch (what) {
      case 0:
        header->count = 5;
        header->dims[0] = 5;
        return;
      case 1:
        header->dtype = cc::DType::i32;
        return;
      case 2:
        *header = header_of("d");
        return;
      case 3:
        header->kind = Kind::broadcast;
        return;
      case 4:
        header->reduce = cc::ReduceOp::max;
        return;
      case 5:
        header->prescale = 0.5;
        return;
      case 6:
        header->device = cc::Device::gpu;
        return;
      default:
        header->unsupported = 1;
    }
  }

  const bool all_;
  std::vector<Program> programs_;
};

}  // namespace

int main(int arguments, char** words) {
  const std::string choice = arguments > 1 ? words[1] : "";
  if (std::find(std::begin(mutants), std::end(mutants), choice) != std::end(mutants)) {
    mutant = choice;
  } else if (!choice.empty() && choice != "all") {
    std::printf("there is no mutant '%s'\n", choice.c_str());
    return 2;
  }
  size_t states = 0;
  const Programs programs(choice == "all");
  for (const Program& program : programs.get()) {
    const size_t more = Explorer(program).run();
    if (more == 0) return 1;
    states += more;
  }
  std::printf("explorer: %zu programs, %zu states, no violation\n", programs.get().size(), states);
  return 0;
}
