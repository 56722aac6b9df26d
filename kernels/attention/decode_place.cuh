// What a block of decode.cuh works on: its keys as far as the position tells, and its heads.
#pragma once

#include "abi/attention.cuh"
#include "common/base.cuh"

namespace fused {

// This block's place in the grid of the step, which may be a part of the launch's.
struct Block {
  uint32_t x, y, z, of_x, of_y;
};

// What there is to do, as far as the position tells.
struct Work {
  uint32_t low, end;    // keys from earlier steps that are seen
  uint32_t start;       // where the first tile begins
  uint32_t tiles;
  uint32_t active;      // blocks that take part

  // Tiles have `keys` keys. In pages they begin at multiples of that.
  __device__ Work(const DecodingParams& p, const Block& block, uint32_t position, uint32_t keys, bool paged) {
    end = min(position, p.slots);
    low = p.window && position + 1 > p.window ? min(position + 1 - p.window, end) : 0;
    start = paged ? low / keys * keys : low;
    tiles = (end - start + keys - 1) / keys;
    active = min(block.of_x, max(1u, (tiles + p.tiles - 1) / p.tiles));
  }
};

// Which heads a block works on.
struct Place {
  uint32_t kv, head;  // key/value head, first query head
  int heads;
  bool appends;       // of the blocks with these keys, those of the first query heads append
  uint32_t qkv, out;  // elements before this sequence's row, and these heads' values
  uint64_t plane;     // before these heads' cache
  uint32_t row;       // of blocks

  // `most`: query heads that a block takes.
  __device__ Place(const DecodingParams& p, const Block& block, int head_dim, uint32_t most) {
    const uint32_t group = p.heads / p.kv_heads, parts = (group + most - 1) / most;
    const uint32_t part = block.y % parts, b = block.z;
    kv = block.y / parts;
    head = kv * group + part * most;
    heads = min(group - part * most, most);
    appends = part == 0;
    qkv = b * (p.heads + 2 * p.kv_heads) * head_dim;
    plane = (uint64_t(b) * p.kv_heads + kv) * p.slots * head_dim;
    out = (b * p.heads + head) * head_dim;
    row = b * block.of_y + block.y;
  }
};

}  // namespace fused
