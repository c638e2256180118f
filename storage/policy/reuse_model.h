// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace crumb::storage {

// Estimates the value of keeping an item longer, from the history of all items.
//
// Items fall into classes by how often they were used. Their age is the number of epochs since
// their last use. A period begins when an item is used, and ends when it is used again or is given
// up. From the periods seen the model estimates, per class and age, the chance of a use in the next
// epoch; the worth of an item is the most uses per epoch of further residence that any horizon
// offers (the Gittins index of a job that either pays one hit or is abandoned). Estimates of a
// class lean on all classes together as long as it has seen little, and before anything was seen
// worth falls with age, which is LRU. Old evidence fades.
//
// Not thread-safe. Time is the caller's: AdvanceEpoch().
class ReuseModel {
 public:
  static constexpr size_t kClasses = 9;
  static constexpr size_t kAges = 80;  // the last one stands for everything older

  ReuseModel();

  // The class of an item used `uses` times after its insertion.
  static size_t ClassOf(uint32_t uses);

  uint32_t epoch() const { return epoch_; }
  size_t AgeOf(uint32_t last_use_epoch) const;

  // A period of an item of class `item_class` begins now.
  void Begin(size_t item_class);
  enum class Ending { kUsed, kGivenUp };
  // The period that began at `last_use_epoch` ends now.
  void End(size_t item_class, uint32_t last_use_epoch, Ending ending);

  // Learns from the periods so far and makes everything one epoch older.
  void AdvanceEpoch();

  // Expected uses per epoch of residence, by class and age. Changes with AdvanceEpoch() only.
  double Worth(size_t item_class, size_t age) const { return classes_[item_class].worth[age]; }

 private:
  using ByAge = std::array<double, kAges>;

  struct Class {
    ByAge used{};              // periods that ended so at that age, faded
    ByAge given_up{};          // likewise
    ByAge open{};              // periods not ended, by begin epoch modulo kAges
    double open_oldest = 0;    // periods not ended and of the last age
    double oldest_epochs = 0;  // epochs that periods spent at the last age; old evidence fades
    ByAge hazard{};            // estimated chance of a use at an age, given none before
    ByAge worth{};
  };

  void Learn();
  void Estimate(Class& item_class, const ByAge& prior) const;
  static void Evaluate(Class& item_class);

  uint32_t epoch_ = 0;
  std::array<Class, kClasses> classes_;
  Class all_;  // sum over the classes
};

}  // namespace crumb::storage
