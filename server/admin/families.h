// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "prometheus/metric_family.h"
#include "prometheus/text_serializer.h"

namespace crumb::server {

struct ClusterScrape;

// Collects the series of a scrape in families, one for each name. The series of a family must be
// added one after the other, because a family that is named again later would appear twice in the
// text. Not thread-safe; one object serves one scrape.
class Families {
 public:
  using LabelList = std::vector<std::pair<std::string, std::string>>;

  // Add one series of a counter or of a gauge. `help` counts for the first series of a family.
  void Counter(const std::string& name, const std::string& help, double value,
               const LabelList& labels = {}) {
    prometheus::ClientMetric& metric = Add(name, help, prometheus::MetricType::Counter, labels);
    metric.counter.value = value;
  }
  void Gauge(const std::string& name, const std::string& help, double value,
             const LabelList& labels = {}) {
    prometheus::ClientMetric& metric = Add(name, help, prometheus::MetricType::Gauge, labels);
    metric.gauge.value = value;
  }
  // `count(i)` are the observations of bucket i alone, bounds.size() + 1 of them. Adds one series
  // of a histogram with upper bounds `bounds`, whose observations add up to `sum`.
  template <typename Bounds, typename Count>
  void HistogramOf(const std::string& name, const std::string& help, const Bounds& bounds,
                   const Count& count, double sum, const LabelList& labels = {}) {
    prometheus::ClientMetric& metric = Add(name, help, prometheus::MetricType::Histogram, labels);
    uint64_t cumulative = 0;
    for (size_t i = 0; i < bounds.size(); ++i) {
      cumulative += count(i);
      metric.histogram.bucket.push_back({cumulative, bounds[i]});
    }
    cumulative += count(bounds.size());
    metric.histogram.bucket.push_back({cumulative, std::numeric_limits<double>::infinity()});
    metric.histogram.sample_count = cumulative;
    metric.histogram.sample_sum = sum;
  }

  // Returns all families as Prometheus text.
  std::string Serialize() const { return prometheus::TextSerializer().Serialize(families_); }

 private:
  prometheus::ClientMetric& Add(const std::string& name, const std::string& help,
                                prometheus::MetricType type, const LabelList& labels) {
    if (families_.empty() || families_.back().name != name) {
      families_.push_back({name, help, type, {}});
    }
    prometheus::ClientMetric& metric = families_.back().metric.emplace_back();
    for (const auto& [label, value] : labels) metric.label.push_back({label, value});
    return metric;
  }

  std::vector<prometheus::MetricFamily> families_;
};

// Adds the series of the cluster and of its transport (cluster_series.cc).
void AddCluster(Families& families, const ClusterScrape& scrape);

}  // namespace crumb::server
