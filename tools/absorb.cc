// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tools/commands.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <filesystem>
#include <map>
#include <optional>
#include <vector>

#include "calibration/linear_weight.h"
#include "common/errno_status.h"
#include "common/json_file.h"
#include "common/rotation_file.h"
#include "common/status_macros.h"
#include "common/unique_fd.h"
#include "fmt/format.h"
#include "models/checkpoint.h"
#include "tools/attention_weights.h"

namespace crumb::tools {
namespace {

namespace fs = std::filesystem;
using calibration::EncodedWeight;
using calibration::LinearWeight;
using calibration::ValuePath;

// The largest change of the product by rounding the folded weights to their dtype: relative, root
// mean square.
double ToleranceOf(const std::string& dtype) {
  if (dtype == "F32") return 1e-5;
  if (dtype == "F16") return 2e-3;
  return dtype == "BF16" ? 1e-2 : 8e-2;
}

absl::Status FileError(const std::error_code& error, const std::string& what) {
  return ErrnoStatus(error.value(), what);
}

// A folder that the destructor removes, unless it was kept.
class Draft {
 public:
  explicit Draft(const std::string& out) : path_(out + ".tmp." + std::to_string(::getpid())) {}
  ~Draft() {
    std::error_code ignored;
    if (!kept_) fs::remove_all(path_, ignored);
  }
  Draft(const Draft&) = delete;
  Draft& operator=(const Draft&) = delete;

  const std::string& path() const { return path_; }
  absl::Status RenameTo(const std::string& out) {
    std::error_code error;
    fs::rename(path_, out, error);
    if (error) return FileError(error, "renaming " + path_ + " to " + out);
    kept_ = true;
    return absl::OkStatus();
  }

 private:
  const std::string path_;
  bool kept_ = false;
};

absl::Status WriteAt(const std::string& path, int64_t offset, std::span<const std::byte> bytes) {
  const UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
  if (!fd.valid()) return ErrnoStatus(errno, "opening " + path);
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t put = ::pwrite(fd.get(), bytes.data() + done, bytes.size() - done,
                                 offset + static_cast<int64_t>(done));
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) return ErrnoStatus(put < 0 ? errno : EIO, "writing " + path);
    done += static_cast<size_t>(put);
  }
  return absl::OkStatus();
}

class Absorber {
 public:
  Absorber(const AbsorbCommand& command, const std::function<void(double)>& progress)
      : command_(command), progress_(progress), draft_(command.out) {}

  absl::Status Run() {
    CRUMB_RETURN_IF_ERROR(Open());
    CRUMB_RETURN_IF_ERROR(CopyFolder());
    for (size_t i = 0; i < layers_.size(); ++i) {
      CRUMB_RETURN_IF_ERROR(AbsorbLayer(layers_[i], static_cast<int>(i)));
      Report(kCopyShare +
             kLayerShare * static_cast<double>(i + 1) / static_cast<double>(layers_.size()));
    }
    CRUMB_RETURN_IF_ERROR(
        WriteRotationFile(absorbed_, draft_.path() + "/" + kAbsorbedRotationFile));
    CRUMB_RETURN_IF_ERROR(draft_.RenameTo(command_.out));
    Report(1.0);
    return absl::OkStatus();
  }

  CommandResult Result() const {
    std::string text =
        fmt::format("{} layers, {} KV heads, head_dim {}, weights {}\n", layers_.size(),
                    weights_->kv_heads(), weights_->head_dim(), dtypes_);
    text += fmt::format(
        "largest relative difference of o_proj(v_proj(x)) {:.2g} in layer {} "
        "(at most {:.2g})\n",
        max_error_, max_layer_, tolerance_);
    for (const std::string& warning : warnings_) text += "warning: " + warning + "\n";
    text += fmt::format("serve {} with {}/{}\n", command_.out, command_.out, kAbsorbedRotationFile);
    return CommandResult::Done(text, {{"layers", layers_.size()},
                                      {"kv_heads", weights_->kv_heads()},
                                      {"head_dim", weights_->head_dim()},
                                      {"weights", dtypes_},
                                      {"max_error", max_error_},
                                      {"tolerance", tolerance_},
                                      {"errors", errors_},
                                      {"warnings", warnings_},
                                      {"digest", RotationDigest(absorbed_)}});
  }

 private:
  // The fractions of the work, for progress.
  static constexpr double kCopyShare = 0.2;
  static constexpr double kLayerShare = 0.79;

  void Report(double done) const {
    if (progress_) progress_(done);
  }

  absl::Status Open() {
    CRUMB_ASSIGN_OR_RETURN(file_, ReadRotationFile(command_.rotation));
    auto absorbed = calibration::AbsorbedRotationFile(file_);
    if (!absorbed.ok()) {
      return absl::InvalidArgumentError(command_.rotation + ": " +
                                        std::string(absorbed.status().message()));
    }
    absorbed_ = std::move(absorbed).value();
    std::error_code error;
    const fs::path model = fs::weakly_canonical(command_.model, error);
    const fs::path out = fs::weakly_canonical(command_.out, error);
    if (std::mismatch(model.begin(), model.end(), out.begin(), out.end()).first == model.end()) {
      return absl::InvalidArgumentError(command_.out + " lies in the model's own folder");
    }
    if (fs::exists(command_.out, error)) {
      return absl::AlreadyExistsError(command_.out + " is there already; name a new folder");
    }
    if (fs::exists(model / kAbsorbedRotationFile, error)) {
      return absl::InvalidArgumentError(command_.model + ": R_V is absorbed already, its " +
                                        kAbsorbedRotationFile + " is there");
    }
    CRUMB_ASSIGN_OR_RETURN(weights_, AttentionWeights::Open(command_.model));
    CRUMB_RETURN_IF_ERROR(weights_->CheckLinearInValues());
    CRUMB_ASSIGN_OR_RETURN(layers_, weights_->LayersOf(file_, command_.rotation));
    // Missing weights are reported before anything is copied.
    for (const int layer : layers_) CRUMB_RETURN_IF_ERROR(weights_->CheckLayer(layer));
    return absl::OkStatus();
  }

  // Copies the files to which links refer; links to folders stay links.
  absl::Status CopyFolder() {
    std::error_code error;
    if (!fs::create_directories(draft_.path(), error)) {
      return FileError(error, "creating " + draft_.path());
    }
    for (fs::recursive_directory_iterator it(command_.model, error), end; it != end;
         it.increment(error)) {
      if (error) break;
      const fs::path to = draft_.path() / fs::relative(it->path(), command_.model);
      if (it->is_directory(error)) {
        it->is_symlink() ? fs::copy_symlink(it->path(), to, error)
                         : static_cast<void>(fs::create_directory(to, error));
      } else {
        fs::copy_file(it->path(), to, error);
        // Some caches hold weights read-only, but they are written below.
        if (!error) fs::permissions(to, fs::perms::owner_write, fs::perm_options::add, error);
      }
      if (error) return FileError(error, "copying " + it->path().string());
    }
    if (error) return FileError(error, "reading " + command_.model);
    Report(kCopyShare);
    return absl::OkStatus();
  }

  // Returns the matrices of one layer for every KV head of the model.
  std::vector<Eigen::MatrixXf> MatricesOf(const std::vector<float>& values, int index) const {
    const int64_t dim = file_.head_dim;
    std::vector<Eigen::MatrixXf> matrices;
    for (int head = 0; head < weights_->kv_heads(); ++head) {
      const int64_t layer_at = file_.layers == 1 ? 0 : index;
      const int64_t at = layer_at * file_.kv_heads + (file_.kv_heads == 1 ? 0 : head);
      matrices.emplace_back(
          Eigen::Map<const calibration::RowMajorF>(&values[at * dim * dim], dim, dim));
    }
    return matrices;
  }

  absl::Status Put(const RawTensor& tensor, std::span<const std::byte> bytes) const {
    const fs::path to = draft_.path() / fs::relative(tensor.file, command_.model);
    return WriteAt(to.string(), tensor.file_offset, bytes);
  }

  // Writes `linear` over its original bytes, and replaces it by the values that readers will get.
  absl::Status Replace(const AttentionWeights::Projection& projection, LinearWeight& linear) const {
    CRUMB_ASSIGN_OR_RETURN(const EncodedWeight encoded, calibration::EncodeWeight(linear));
    CRUMB_RETURN_IF_ERROR(Put(projection.weight, encoded.weight));
    RawTensor weight = projection.weight;
    weight.bytes = encoded.weight;
    if (!projection.scale) {
      CRUMB_ASSIGN_OR_RETURN(linear, calibration::DecodeWeight(weight, nullptr));
      return absl::OkStatus();
    }
    CRUMB_RETURN_IF_ERROR(Put(*projection.scale, encoded.scale));
    RawTensor scale = *projection.scale;
    scale.bytes = encoded.scale;
    CRUMB_ASSIGN_OR_RETURN(linear, calibration::DecodeWeight(weight, &scale));
    return absl::OkStatus();
  }

  absl::Status AbsorbLayer(int layer, int index) {
    CRUMB_ASSIGN_OR_RETURN(const auto v, weights_->ValueProjection(layer));
    CRUMB_ASSIGN_OR_RETURN(const auto o, weights_->OutputProjection(layer));
    CRUMB_ASSIGN_OR_RETURN(LinearWeight v_linear, v.Decode());
    CRUMB_ASSIGN_OR_RETURN(LinearWeight o_linear, o.Decode());
    ValuePath before{.v_weight = v_linear.values, .v_bias = {}, .o_weight = o_linear.values};
    std::optional<LinearWeight> bias;
    if (v.bias) {
      CRUMB_ASSIGN_OR_RETURN(bias, AttentionWeights::DecodeBias(*v.bias));
      before.v_bias = bias->values.row(0).transpose();
    }
    ValuePath after = before;
    calibration::AbsorbRotation(
        MatricesOf(file_.rotation_v, index),
        MatricesOf(file_.dual_v.empty() ? file_.rotation_v : file_.dual_v, index), after);
    v_linear.values = std::move(after.v_weight);
    o_linear.values = std::move(after.o_weight);
    CRUMB_RETURN_IF_ERROR(Replace(v, v_linear));
    CRUMB_RETURN_IF_ERROR(Replace(o, o_linear));
    after.v_weight = std::move(v_linear.values);
    after.o_weight = std::move(o_linear.values);
    if (bias) {
      bias->values.row(0) = after.v_bias->transpose();
      CRUMB_ASSIGN_OR_RETURN(const EncodedWeight encoded, calibration::EncodeWeight(*bias));
      CRUMB_RETURN_IF_ERROR(Put(*v.bias, encoded.weight));
    }
    weights_->Release(v);
    weights_->Release(o);
    Note(layer, v_linear.dtype, o);
    return CheckSame(layer, before, after,
                     std::max(ToleranceOf(v_linear.dtype), ToleranceOf(o_linear.dtype)));
  }

  void Note(int layer, const std::string& dtype, const AttentionWeights::Projection& o) {
    if (dtypes_.find(dtype) == std::string::npos) dtypes_ += (dtypes_.empty() ? "" : ", ") + dtype;
    if (o.static_input_scale && warnings_.empty()) {
      warnings_.push_back(fmt::format(
          "layer {} and perhaps others: o_proj.input_scale was measured in the model's basis and "
          "is kept; check that rotated attention outputs stay inside it",
          layer));
    }
  }

  absl::Status CheckSame(int layer, const ValuePath& before, const ValuePath& after,
                         double tolerance) {
    const double error = calibration::ProductError(before, after, file_.head_dim);
    errors_.push_back(error);
    if (error >= max_error_) {
      max_error_ = error;
      max_layer_ = layer;
    }
    tolerance_ = std::max(tolerance_, tolerance);
    if (error <= tolerance) return absl::OkStatus();
    return absl::InternalError(fmt::format(
        "{}: layer {}: with R_V absorbed, o_proj(v_proj(x)) differs by {:.2g}, more than {:.2g}; "
        "nothing was written",
        command_.model, layer, error, tolerance));
  }

  const AbsorbCommand& command_;
  const std::function<void(double)>& progress_;
  Draft draft_;
  RotationFile file_;
  RotationFile absorbed_;
  std::unique_ptr<AttentionWeights> weights_;
  std::vector<int> layers_;  // the model's numbers of the layers
  std::vector<double> errors_;
  std::vector<std::string> warnings_;
  std::string dtypes_;
  double max_error_ = 0.0;
  double tolerance_ = 0.0;
  int max_layer_ = 0;
};

}  // namespace

CommandResult RunAbsorb(const AbsorbCommand& command, const std::function<void(double)>& progress) {
  Absorber absorber(command, progress);
  const absl::Status status = absorber.Run();
  return status.ok() ? absorber.Result() : CommandResult::Failed(status);
}

}  // namespace crumb::tools
