// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "client/worker/keyspace_binding.h"
#include "client/worker/page.h"
#include "crumb/quality_sample.h"

namespace crumb::client {

// Where complete pages go to become visible to others.
class PageSink {
 public:
  virtual ~PageSink() = default;

  // Takes a page to publish, or drops and counts it. Never blocks. Thread-safe.
  virtual void Publish(std::shared_ptr<const KeyspaceBinding> keyspace,
                       std::shared_ptr<const Page> page) = 0;

  // Makes loaded pages visible where they lie, which crumbd has elsewhere; or drops and counts
  // them. Never blocks. Thread-safe.
  virtual void Place(std::shared_ptr<const KeyspaceBinding> keyspace,
                     std::vector<std::shared_ptr<const Page>> pages) = 0;

  // Notes that a window is kept back because it holds a non-finite row. Never blocks. Thread-safe.
  virtual void NoteRefusedWindow() = 0;

  // Reports what the quality watch measured of one window. Never blocks. Thread-safe.
  virtual void NoteQuality(std::span<const QualitySample> layers) = 0;
};

}  // namespace crumb::client
