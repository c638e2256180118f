/* SPDX-FileCopyrightText: The Crumb authors
 * SPDX-License-Identifier: Apache-2.0
 *
 * A device worker in C over libcrumb.so: c_api_device_program SOCKET_DIR. Where there is a GPU,
 * plays a prompt and decode steps there and on the CPU, from the same pages, and compares the
 * outputs. On a machine without a GPU it checks the errors of the calls. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "crumb_device.h"

#ifdef CRUMB_HAVE_CUDA
#include <cuda_runtime_api.h>
#endif

static void Fail(const char* what) {
  fprintf(stderr, "%s: %s\n", what, crumb_message());
  exit(1);
}
static void Check(crumb_code code, const char* what) {
  if (code != CRUMB_OK) Fail(what);
}
static void Expect(int right, const char* what) {
  if (!right) Fail(what);
}

static void Misuse(void) {
  crumb_device* device = NULL;
  Expect(crumb_device_open("abacus", 0, &device) == CRUMB_INVALID_ARGUMENT, "another back end");
  Expect(strstr(crumb_message(), "abacus") != NULL, "message");
  Expect(crumb_device_open(NULL, 0, &device) == CRUMB_INVALID_ARGUMENT, "no back end");
  Expect(crumb_device_open("cuda", 0, NULL) == CRUMB_INVALID_ARGUMENT, "no out");
  Expect(crumb_device_open("cuda", 4096, &device) != CRUMB_OK && device == NULL, "device 4,096");
  crumb_device_worker* worker = NULL;
  crumb_worker_options options = {.size = sizeof(options)};
  Expect(crumb_device_worker_open(NULL, NULL, &options, NULL, &worker) == CRUMB_INVALID_ARGUMENT,
         "a worker without device");
  Expect(crumb_device_batch_start(NULL) == CRUMB_INVALID_ARGUMENT, "start without batch");
  Expect(crumb_device_batch_append(NULL, 0, &options, &options) == CRUMB_INVALID_ARGUMENT,
         "append without batch");
  Expect(crumb_device_sequence_length(NULL) == 0, "length without sequence");
  crumb_device_sequence_close(NULL);
  crumb_device_batch_close(NULL);
  crumb_device_worker_close(NULL);
  crumb_device_close(NULL);
}

#ifdef CRUMB_HAVE_CUDA
enum { kLayers = 2, kKvHeads = 2, kQHeads = 8, kHeadDim = 128, kPrompt = 1000, kDecode = 8 };
enum { kK = kKvHeads * kHeadDim, kQ = kQHeads * kHeadDim, kChunk = 256 };

static uint16_t k[kPrompt * kK], v[kPrompt * kK], q[kPrompt * kQ];
static float on_cpu[kPrompt * kQ], on_gpu[kPrompt * kQ];
static void* rows[4]; /* k, v, q, out on the device */

/* bf16 values in [-1, 1) that depend on the arguments only. */
static void Fill(uint16_t* out, int count, uint32_t seed) {
  for (int i = 0; i < count; ++i) {
    seed = seed * 1664525u + 1013904223u;
    const float value = (float)(int32_t)seed / 2147483648.0f;
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    out[i] = (uint16_t)(bits >> 16);
  }
}

static void FillRows(const int32_t* tokens, int begin, int end, int layer) {
  for (int t = begin; t < end; ++t) {
    const uint32_t seed = (uint32_t)tokens[t] * 977u + (uint32_t)t * 31u + (uint32_t)layer;
    Fill(k + (t - begin) * kK, kK, seed);
    Fill(v + (t - begin) * kK, kK, seed + 7u);
    Fill(q + (t - begin) * kQ, kQ, seed + 13u);
  }
}

static void PassOnCpu(crumb_sequence* sequence, const int32_t* tokens, int begin, int end) {
  const uint32_t count = (uint32_t)(end - begin);
  for (int layer = 0; layer < kLayers; ++layer) {
    FillRows(tokens, begin, end, layer);
    Check(crumb_sequence_append(sequence, layer, count, k, v), "append");
    Check(crumb_sequence_attend(sequence, layer, count, q, on_cpu), "attend");
  }
  Check(crumb_sequence_advance(sequence, tokens + begin, count), "advance");
}

static void Cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  exit(1);
}

/* The outputs of the last layer come back, as those of PassOnCpu. */
static void PassOnGpu(crumb_device_batch* batch, cudaStream_t stream,
                      crumb_device_sequence* sequence, const int32_t* tokens, int count) {
  const int begin = (int)crumb_device_sequence_length(sequence);
  const crumb_pass_entry entry = {sequence, (uint32_t)count};
  Check(crumb_device_batch_prepare(batch, &entry, 1), "prepare");
  Check(crumb_device_batch_start(batch), "start");
  for (int layer = 0; layer < kLayers; ++layer) {
    FillRows(tokens, begin, begin + count, layer);
    const size_t k_bytes = sizeof(uint16_t) * kK * (size_t)count;
    const size_t q_bytes = sizeof(uint16_t) * kQ * (size_t)count;
    Cuda(cudaMemcpyAsync(rows[0], k, k_bytes, cudaMemcpyHostToDevice, stream), "copy");
    Cuda(cudaMemcpyAsync(rows[1], v, k_bytes, cudaMemcpyHostToDevice, stream), "copy");
    Cuda(cudaMemcpyAsync(rows[2], q, q_bytes, cudaMemcpyHostToDevice, stream), "copy");
    Check(crumb_device_batch_append(batch, layer, rows[0], rows[1]), "append");
    Check(crumb_device_batch_attend(batch, layer, rows[2], rows[3]), "attend");
    Cuda(cudaMemcpyAsync(on_gpu, rows[3], 2 * q_bytes, cudaMemcpyDeviceToHost, stream), "copy");
    Cuda(cudaStreamSynchronize(stream), "wait");
  }
  const uint32_t kept = (uint32_t)count;
  Check(crumb_device_batch_advance(batch, tokens + begin, &kept, 1), "advance");
}

static void ExpectAlike(int tokens, const char* what) {
  double error = 0.0, norm = 0.0;
  for (int i = 0; i < tokens * kQ; ++i) {
    error += pow((double)on_gpu[i] - on_cpu[i], 2);
    norm += pow(on_cpu[i], 2);
  }
  const double relative = sqrt(error / norm);
  printf("%s: relative error %.5f\n", what, relative);
  Expect(relative < 1e-2, what);
}

static crumb_device_batch* OpenBatch(crumb_device_worker* worker, cudaStream_t stream,
                                     uint32_t prompts) {
  crumb_device_batch_options options = {.size = sizeof(options)};
  options.stream = stream;
  options.prompts = prompts;
  options.tokens = prompts != 0 ? kChunk : 1;
  options.pages = 64;
  options.output_f32 = 1;
  crumb_device_batch* batch = NULL;
  Check(crumb_device_batch_open(worker, &options, &batch), "batch");
  return batch;
}

/* Leaves pages of the prompt with crumbd. */
static void Publish(crumb_worker* cpu, const int32_t* tokens) {
  crumb_sequence* writer = NULL;
  Check(crumb_sequence_begin(cpu, tokens, kPrompt, NULL, &writer, NULL), "begin");
  PassOnCpu(writer, tokens, 0, kPrompt);
  Check(crumb_sequence_finish(writer), "finish");
  crumb_sequence_close(writer);
  Check(crumb_worker_wait_published(cpu, 10000), "publish");
}

static void Compare(crumb_worker* cpu, crumb_device_worker* worker, cudaStream_t stream,
                    const int32_t* tokens) {
  crumb_device_batch* prompts = OpenBatch(worker, stream, 1);
  crumb_device_batch* decode = OpenBatch(worker, stream, 0);
  crumb_sequence_options patient = {.size = sizeof(patient)};
  patient.deadline_ms = 10000;
  crumb_sequence* expected = NULL;
  crumb_device_sequence* sequence = NULL;
  uint32_t cached[2] = {0, 0};
  Check(crumb_sequence_begin(cpu, tokens, kPrompt, &patient, &expected, &cached[0]), "begin");
  Check(crumb_device_sequence_begin(worker, tokens, kPrompt, &patient, &sequence, &cached[1]),
        "device begin");
  printf("cached %u on the CPU, %u on the GPU\n", cached[0], cached[1]);
  Expect(cached[0] == cached[1] && cached[0] == 704, "cached tokens");
  while ((int)crumb_device_sequence_length(sequence) < kPrompt) {
    int count = (int)crumb_device_sequence_pass_tokens_max(sequence);
    if (count > kChunk) count = kChunk;
    const int begin = (int)crumb_device_sequence_length(sequence);
    PassOnGpu(prompts, stream, sequence, tokens, count);
    PassOnCpu(expected, tokens, begin, begin + count);
    ExpectAlike(count, "prompt");
  }
  for (int i = 0; i < kDecode; ++i) {
    PassOnGpu(decode, stream, sequence, tokens, 1);
    PassOnCpu(expected, tokens, kPrompt + i, kPrompt + i + 1);
    ExpectAlike(1, "decode");
  }
  crumb_device_sequence* fork = NULL;
  Check(crumb_device_batch_fork(decode, sequence, &fork), "fork");
  Expect(crumb_device_sequence_length(fork) == kPrompt + kDecode, "length of the fork");
  crumb_device_sequence_close(fork);
  Expect(crumb_device_batch_append(decode, 99, rows[0], rows[1]) == CRUMB_INVALID_ARGUMENT,
         "layer 99");
  Check(crumb_device_batch_finish(decode, sequence), "finish");
  Check(crumb_device_worker_wait_published(worker, 10000), "publish");
  crumb_sequence_close(expected);
  crumb_device_sequence_close(sequence);
  crumb_device_batch_close(prompts);
  crumb_device_batch_close(decode);
}

static void RunOnGpu(crumb_client* client, crumb_device* device) {
  crumb_worker_options options = {.size = sizeof(options)};
  options.model = "made-up";
  options.weights = "c-device";
  options.layers = kLayers;
  options.kv_heads = kKvHeads;
  options.q_heads = kQHeads;
  options.head_dim = kHeadDim;
  static int32_t tokens[kPrompt + kDecode];
  for (int i = 0; i < kPrompt + kDecode; ++i) tokens[i] = (i * 7919) % 50000;
  crumb_worker* cpu = NULL;
  Check(crumb_worker_open(client, &options, &cpu), "worker");
  Publish(cpu, tokens);

  crumb_device_worker_options pools = {.size = sizeof(pools)};
  pools.pages = 128;
  pools.sequences = 4;
  pools.pool_bytes = pools.pool_sink_bytes = pools.pool_handle_bytes = 16 << 20;
  crumb_device_worker* worker = NULL;
  Check(crumb_device_worker_open(client, device, &options, &pools, &worker), "device worker");
  crumb_device_close(device); /* the worker keeps it */
  cudaStream_t stream = NULL;
  Cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  const size_t bytes[4] = {2 * kChunk * kK, 2 * kChunk * kK, 2 * kChunk * kQ, 4 * kChunk * kQ};
  for (int i = 0; i < 4; ++i) Cuda(cudaMalloc(&rows[i], bytes[i]), "rows");
  Compare(cpu, worker, stream, tokens);
  crumb_worker_counters counters = {.size = sizeof(counters)};
  Check(crumb_device_worker_read_counters(worker, &counters), "counters");
  printf("pool pages %llu\n", (unsigned long long)counters.pool_pages);
  Expect(counters.verify_failures == 0, "pages came damaged");
  crumb_worker_close(cpu);
  crumb_device_worker_close(worker);
  for (int i = 0; i < 4; ++i) Cuda(cudaFree(rows[i]), "rows");
  Cuda(cudaStreamDestroy(stream), "stream");
}
#endif

int main(int argc, char** argv) {
  if (argc != 2) {
    fprintf(stderr, "usage: c_api_device_program SOCKET_DIR\n");
    return 2;
  }
  crumb_client_options client_options = {.size = sizeof(client_options)};
  client_options.socket_dir = argv[1];
  crumb_client* client = NULL;
  Check(crumb_client_open(&client_options, &client), "client");
  Check(crumb_client_wait_connected(client, 5000), "connect");
  Misuse();
  crumb_device* device = NULL;
  const crumb_code opened = crumb_device_open("cuda", 0, &device);
  if (opened == CRUMB_UNAVAILABLE || opened == CRUMB_FAILED_PRECONDITION) {
    printf("no device: %s\n", crumb_message());
  } else {
    Check(opened, "device");
#ifdef CRUMB_HAVE_CUDA
    RunOnGpu(client, device);
#else
    Fail("a device of a build without CUDA");
#endif
  }
  crumb_client_close(client);
  return 0;
}
