#include "base/cores.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <sstream>
#include <string>
#include <vector>

namespace cc {
namespace {

constexpr double no_quota = std::numeric_limits<double>::infinity();

bool lists(const std::string& commas, const std::string& word) {
  return ("," + commas + ",").find("," + word + ",") != std::string::npos;
}

double quota_of_folder(const std::string& folder) {
  double allowed = 0, period = 0;
  std::ifstream both(folder + "/cpu.max");
  if (both) {  // version 2; "max" is no number
    both >> allowed >> period;
  } else {
    std::ifstream(folder + "/cpu.cfs_quota_us") >> allowed;
    std::ifstream(folder + "/cpu.cfs_period_us") >> period;
  }
  return allowed > 0 && period > 0 ? allowed / period : no_quota;
}

// Of a folder and those above it, up to where its hierarchy is mounted.
double quota_up_to(const std::string& top, std::string below) {
  double least = no_quota;
  for (;;) {
    least = std::min(least, quota_of_folder(top + below));
    if (below.empty()) return least;
    below.erase(below.rfind('/'));
  }
}

// The paths of a process's groups by their controllers, which version 2 does not list.
std::map<std::string, std::string> groups_of(const std::string& file) {
  std::map<std::string, std::string> groups;
  std::ifstream lines(file);
  for (std::string line; std::getline(lines, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    groups[line.substr(first + 1, second - first - 1)] = line.substr(second + 1);
  }
  return groups;
}

}  // namespace

cpu_set_t bound_cores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (sched_getaffinity(0, sizeof cores, &cores) == 0) return cores;
  const long online = std::min<long>(sysconf(_SC_NPROCESSORS_ONLN), CPU_SETSIZE);  // more than the set has room for
  for (long core = 0; core < online; ++core) CPU_SET(static_cast<size_t>(core), &cores);
  return cores;
}

double core_quota(pid_t process, const std::string& root) {
  const std::string folder = root + "/proc/" + std::to_string(process);
  const std::map<std::string, std::string> groups = groups_of(folder + "/cgroup");
  double least = no_quota;
  std::ifstream mounts(folder + "/mountinfo");
  for (std::string line; std::getline(mounts, line);) {
    std::istringstream text(line);
    const std::vector<std::string> words{std::istream_iterator<std::string>(text), {}};
    const auto dash = std::find(words.begin(), words.end(), "-");
    if (words.size() < 6 || words.end() - dash < 4) continue;
    const std::string &begins_at = words[3], &mounted_at = words[4], &kind = dash[1], &options = dash[3];
    if (kind != "cgroup2" && (kind != "cgroup" || !lists(options, "cpu"))) continue;
    const auto group = std::find_if(groups.begin(), groups.end(), [&](const auto& entry) {
      return kind == "cgroup2" ? entry.first.empty() : lists(entry.first, "cpu");
    });
    if (group == groups.end()) continue;
    // A container may see its own group as the root of what is mounted there, and its path as the host sees it.
    const std::string top = begins_at == "/" ? "" : begins_at, &path = group->second;
    const bool inside = path.compare(0, top.size(), top) == 0 && (path.size() == top.size() || path[top.size()] == '/');
    std::string below = inside ? path.substr(top.size()) : "";
    if (below == "/") below.clear();
    least = std::min(least, quota_up_to(root + mounted_at, below));
  }
  return least;
}

}  // namespace cc
