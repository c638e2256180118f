// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/policy/reuse_model.h"

#include <algorithm>
#include <vector>

namespace crumb::storage {
namespace {

// Uses at which the classes begin.
constexpr std::array<uint32_t, ReuseModel::kClasses> kClassBegins = {0, 1, 2, 3, 4, 5, 7, 10, 15};

// An estimate trusts its own evidence and its prior equally at this many periods.
constexpr double kPriorPeriods = 100;

// Without any evidence: small, and falling with age.
constexpr double kFirstHazard = 0.02;

// Evidence halves in 140 epochs.
constexpr double kEpochFading = 0.995;

}  // namespace

ReuseModel::ReuseModel() { Learn(); }

size_t ReuseModel::ClassOf(uint32_t uses) {
  const auto after = std::upper_bound(kClassBegins.begin(), kClassBegins.end(), uses);
  return static_cast<size_t>(after - kClassBegins.begin()) - 1;
}

size_t ReuseModel::AgeOf(uint32_t last_use_epoch) const {
  return std::min<size_t>(epoch_ - last_use_epoch, kAges - 1);
}

void ReuseModel::Begin(size_t item_class) {
  classes_[item_class].open[epoch_ % kAges] += 1;
  all_.open[epoch_ % kAges] += 1;
}

void ReuseModel::End(size_t item_class, uint32_t last_use_epoch, Ending ending) {
  const size_t age = AgeOf(last_use_epoch);
  for (Class* target : {&classes_[item_class], &all_}) {
    (ending == Ending::kUsed ? target->used : target->given_up)[age] += 1;
    (age == kAges - 1 ? target->open_oldest : target->open[last_use_epoch % kAges]) -= 1;
  }
}

void ReuseModel::AdvanceEpoch() {
  Learn();
  ++epoch_;
  const auto grow_older = [this](Class& item_class) {
    for (double& count : item_class.used) count *= kEpochFading;
    for (double& count : item_class.given_up) count *= kEpochFading;
    // Periods that reach the last age leave their slot of the ring to the epoch that begins.
    double& reaches_last_age = item_class.open[(epoch_ + 1) % kAges];
    item_class.open_oldest += reaches_last_age;
    item_class.oldest_epochs = item_class.oldest_epochs * kEpochFading + item_class.open_oldest;
    reaches_last_age = 0;
  };
  for (Class& item_class : classes_) grow_older(item_class);
  grow_older(all_);
}

void ReuseModel::Learn() {
  ByAge first;
  for (size_t age = 0; age < kAges; ++age) first[age] = kFirstHazard / (age + 1);
  Estimate(all_, first);
  for (Class& item_class : classes_) {
    Estimate(item_class, all_.hazard);
    Evaluate(item_class);
  }
}

void ReuseModel::Estimate(Class& item_class, const ByAge& prior) const {
  double reached = 0;  // periods known to have reached `age`
  for (size_t age = kAges; age-- > 0;) {
    double open = item_class.open_oldest;
    if (age < kAges - 1) open = age <= epoch_ ? item_class.open[(epoch_ - age) % kAges] : 0;
    reached += item_class.used[age] + item_class.given_up[age] + open;
    // Periods that are open or were given up at this age saw half of it on average.
    double at_risk = reached - (open + item_class.given_up[age]) / 2;
    if (age == kAges - 1) at_risk = std::max(at_risk, item_class.oldest_epochs);
    item_class.hazard[age] = std::min(
        1.0, (item_class.used[age] + kPriorPeriods * prior[age]) / (at_risk + kPriorPeriods));
  }
}

void ReuseModel::Evaluate(Class& item_class) {
  // Points (epochs of residence, uses) reached by each age. The worth at an age is the steepest
  // slope from its point to a later one: the next corner of the upper hull of the points after it.
  std::array<double, kAges + 1> residence;
  std::array<double, kAges + 1> uses;
  residence[0] = uses[0] = 0;
  double surviving = 1;
  for (size_t age = 0; age < kAges; ++age) {
    uses[age + 1] = uses[age] + surviving * item_class.hazard[age];
    residence[age + 1] = residence[age] + surviving;
    surviving *= 1 - item_class.hazard[age];
  }
  const auto slope = [&](size_t from, size_t to) {
    const double span = residence[to] - residence[from];
    return span > 1e-12 ? (uses[to] - uses[from]) / span : 0.0;
  };
  std::vector<size_t> hull = {kAges};  // corners, nearest last
  for (size_t age = kAges; age-- > 0;) {
    while (hull.size() > 1 && slope(age, hull.back()) <= slope(age, hull[hull.size() - 2])) {
      hull.pop_back();
    }
    item_class.worth[age] = slope(age, hull.back());
    hull.push_back(age);
  }
}

}  // namespace crumb::storage
