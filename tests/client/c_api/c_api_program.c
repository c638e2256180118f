/* SPDX-FileCopyrightText: The Crumb authors
 * SPDX-License-Identifier: Apache-2.0
 *
 * A worker in C over libcrumb.so: c_api_program SOCKET_DIR SEED. Makes up the keys and values of a
 * 1,000-token prompt, publishes its pages, and prints how many tokens the cache had, and a digest
 * of the outputs of a decode step; then the same of an engine of two stages. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "crumb.h"

enum { kLayers = 2, kKvHeads = 2, kQHeads = 4, kHeadDim = 64, kPrompt = 1000 };

static void Check(crumb_code code, const char* what) {
  if (code == CRUMB_OK) return;
  fprintf(stderr, "%s: code %d: %s\n", what, code, crumb_message());
  exit(1);
}

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

/* One pass over tokens [begin, end) of the layers [first, last); the outputs of the last one go to
 * `out`. */
static void PassLayers(crumb_sequence* sequence, const int32_t* tokens, int begin, int end,
                       int first, int last, float* out) {
  static uint16_t k[kPrompt * kKvHeads * kHeadDim], v[kPrompt * kKvHeads * kHeadDim];
  static uint16_t q[kPrompt * kQHeads * kHeadDim];
  const int count = end - begin;
  for (int layer = first; layer < last; ++layer) {
    for (int t = 0; t < count; ++t) {
      const uint32_t seed = (uint32_t)tokens[t] * 977u + (uint32_t)(begin + t) * 31u + layer;
      Fill(k + t * kKvHeads * kHeadDim, kKvHeads * kHeadDim, seed);
      Fill(v + t * kKvHeads * kHeadDim, kKvHeads * kHeadDim, seed + 7u);
      Fill(q + t * kQHeads * kHeadDim, kQHeads * kHeadDim, seed + 13u);
    }
    Check(crumb_sequence_append(sequence, layer - first, count, k, v), "append");
    Check(crumb_sequence_attend(sequence, layer - first, count, q, out), "attend");
  }
  Check(crumb_sequence_advance(sequence, tokens, count), "advance");
}

static void Pass(crumb_sequence* sequence, const int32_t* tokens, int begin, int end, float* out) {
  PassLayers(sequence, tokens, begin, end, 0, kLayers, out);
}

static uint32_t DigestOf(const float* out) {
  uint32_t digest = 2166136261u;
  for (int i = 0; i < kQHeads * kHeadDim; ++i) {
    uint32_t bits;
    memcpy(&bits, &out[i], sizeof(bits));
    digest = (digest ^ bits) * 16777619u;
  }
  return digest;
}

/* Runs the sequence with a stage per layer, each with a client of its own: the first leads. */
static int RunStages(crumb_client_options client_options, crumb_worker_options options,
                     const int32_t* tokens) {
  crumb_client* clients[kLayers];
  crumb_worker* workers[kLayers];
  crumb_sequence* sequences[kLayers];
  static float out[kPrompt * kQHeads * kHeadDim];
  static uint8_t token[CRUMB_LEAD_TOKEN_BYTES(kPrompt)];
  size_t token_bytes = 0;
  uint32_t cached[kLayers];
  client_options.engine = (const uint8_t*)"one-engine-of-16";
  for (int stage = 0; stage < kLayers; ++stage) {
    Check(crumb_client_open(&client_options, &clients[stage]), "client");
    Check(crumb_client_wait_connected(clients[stage], 5000), "connect");
    Check(crumb_rank_part(&options, 0, 1, (uint32_t)stage, kLayers), "part");
    Check(crumb_worker_open(clients[stage], &options, &workers[stage]), "worker");
    if (stage == 0) {
      Check(crumb_sequence_lead(workers[0], tokens, kPrompt, NULL, &sequences[0], &cached[0], token,
                                sizeof(token), &token_bytes),
            "lead");
    } else {
      Check(crumb_sequence_follow(workers[stage], token, token_bytes, tokens, kPrompt, NULL,
                                  &sequences[stage], &cached[stage]),
            "follow");
    }
    if (cached[stage] != cached[0]) return 7;
    const int begin = (int)cached[0];
    PassLayers(sequences[stage], tokens + begin, begin, kPrompt, stage, stage + 1, out);
    PassLayers(sequences[stage], tokens + kPrompt, kPrompt, kPrompt + 1, stage, stage + 1, out);
  }
  if (crumb_rank_part(&options, 0, 1, 0, kLayers + 1) != CRUMB_INVALID_ARGUMENT) return 8;
  printf("stages cached %u digest %08x\n", cached[0], DigestOf(out));
  for (int stage = 0; stage < kLayers; ++stage) {
    crumb_sequence_close(sequences[stage]);
    crumb_worker_close(workers[stage]);
    crumb_client_close(clients[stage]);
  }
  return 0;
}

int main(int argc, char** argv) {
  if (argc != 3) {
    fprintf(stderr, "usage: c_api_program SOCKET_DIR SEED\n");
    return 2;
  }
  if (crumb_abi_version() != CRUMB_ABI_VERSION) return 3;

  crumb_client_options client_options = {.size = sizeof(client_options)};
  client_options.socket_dir = argv[1];
  crumb_client* client = NULL;
  Check(crumb_client_open(&client_options, &client), "client");
  Check(crumb_client_wait_connected(client, 5000), "connect");

  crumb_worker_options options = {.size = sizeof(options)};
  options.model = "made-up";
  options.weights = "1";
  options.layers = kLayers;
  options.kv_heads = kKvHeads;
  options.q_heads = kQHeads;
  options.head_dim = kHeadDim;
  crumb_worker* worker = NULL;
  Check(crumb_worker_open(client, &options, &worker), "worker");

  int32_t tokens[kPrompt + 1];
  for (int i = 0; i <= kPrompt; ++i) tokens[i] = (i * 7919 + atoi(argv[2])) % 50000;
  crumb_sequence* sequence = NULL;
  uint32_t cached = 0;
  Check(crumb_sequence_begin(worker, tokens, kPrompt, NULL, &sequence, &cached), "begin");
  static float out[kPrompt * kQHeads * kHeadDim];
  Pass(sequence, tokens + cached, (int)cached, kPrompt, out);
  Pass(sequence, tokens + kPrompt, kPrompt, kPrompt + 1, out);
  const uint32_t digest = DigestOf(out);
  printf("cached %u digest %08x length %u\n", cached, digest, crumb_sequence_length(sequence));

  /* Misuse returns errors and does not crash. */
  if (crumb_sequence_append(sequence, 99, 1, out, out) != CRUMB_INVALID_ARGUMENT) return 4;
  if (strstr(crumb_message(), "layer 99") == NULL) return 5;
  if (crumb_sequence_append(NULL, 0, 1, out, out) != CRUMB_INVALID_ARGUMENT) return 6;

  Check(crumb_sequence_finish(sequence), "finish");
  Check(crumb_worker_wait_published(worker, 5000), "publish");
  crumb_worker_counters counters = {.size = sizeof(counters)};
  Check(crumb_worker_read_counters(worker, &counters), "counters");
  printf("published %llu deduplicated %llu\n", (unsigned long long)counters.published_pages,
         (unsigned long long)counters.deduplicated_pages);

  const int stages = RunStages(client_options, options, tokens);
  if (stages != 0) return stages;

  /* Handles keep the objects that they need alive: any order of closing works. */
  crumb_client_close(client);
  crumb_worker_close(worker);
  crumb_sequence_close(sequence);
  return 0;
}
