// Who does what. An item is one sequence with one group of query tiles; its keys are cut into tiles of 64. All tiles of
// all items, sequence after sequence, make one line, of which each worker takes an equal share: at most two of its
// pieces are parts of items, the others are whole. Where shares that are little longer let each worker have one piece
// only, items are padded to whole shares. Everybody works this out from the lengths on the device.
#pragma once
#include "device.cuh"

constexpr int KEYS = 64;
constexpr int PIECE_COST = 4;   // tiles that take as long as to begin another piece and to leave another part
constexpr int LEAST_SHARE = 4;  // tiles; with more and smaller parts, adding them takes longer

// Tiles `first` up to `last` of the `tiles` of an item.
struct Piece {
    int sequence, group, length, first, last, tiles;
    int start;  // of the item on the line
    __device__ bool whole() const { return last - first == tiles; }
};

// One of the `count` pieces of an item, the one number `order`. Each worker has room for the results of two.
struct Part {
    int sequence, group, count, order, worker, first_slot;
    __device__ int slot(int k) const { return k == 0 ? first_slot : 2 * (worker + k); }
};

class Schedule {
  public:
    // By whole warps.
    __device__ Schedule(const int* lengths, int batch, int groups, int worker, int workers)
        : lengths(lengths), batch(batch), groups(groups), worker(worker) {
        const int lane = threadIdx.x % 32;
        const int tiles = sum([](int tiles) { return tiles; });
        share = max((tiles + workers - 1) / workers, LEAST_SHARE);
        for (int wider = share; batch * groups <= workers && wider <= share + PIECE_COST; wider++)
            if (sum([wider](int tiles) { return (tiles + wider - 1) / wider; }) <= workers) {
                share = wider;
                padded = true;
                break;
            }
        position = worker * share;
        left = min(share, sum([this](int tiles) { return length_of(tiles); }) - position);
        int before = 0;
        for (int base = 0; base < batch && left > 0; base += 32) {
            const int own = base + lane < batch ? length_of(tiles_of(lengths[base + lane])) * groups : 0;
            int through = own;
            for (int other = 1; other < 32; other *= 2) {
                const int lower = __shfl_up_sync(~0u, through, other);
                if (lane >= other) through += lower;
            }
            const unsigned beyond = __ballot_sync(~0u, position < before + through);
            if (beyond) {
                const int found = __ffs(beyond) - 1;
                const int offset = position - before - __shfl_sync(~0u, through - own, found);
                const int length = __shfl_sync(~0u, own, found) / groups;
                sequence = base + found;
                group = offset / length;
                tile = offset % length;
                break;
            }
            before += __shfl_sync(~0u, through, 31);
        }
    }

    // The next piece, if there is one. By whole warps, which the compiler should know to be of one mind.
    __device__ bool next(Piece& piece) {
        if (__shfl_sync(~0u, left, 0) <= 0) return false;
        const int length = __shfl_sync(~0u, lengths[sequence], 0), tiles = tiles_of(length);
        const int count = __shfl_sync(~0u, min(left, tiles - tile), 0);
        tile = __shfl_sync(~0u, tile, 0);
        piece = {sequence, group, length, tile, tile + count, tiles, position - tile};
        tile += count;
        const int done = tile < tiles ? count : count + length_of(tiles) - tiles;
        left -= done;
        position += done;
        if (tile == tiles) {
            tile = 0;
            if (++group == groups) group = 0, sequence++;
        }
        return true;
    }

    // Of a piece that is not whole.
    __device__ Part part(const Piece& piece) const {
        const int first = piece.start / share, count = (piece.start + piece.tiles - 1) / share - first + 1;
        return {piece.sequence, piece.group, count, worker - first, first, 2 * first + (piece.start % share > 0)};
    }

  private:
    // An empty sequence counts as well: somebody has to write its zeros.
    static __device__ int tiles_of(int length) { return max((length + KEYS - 1) / KEYS, 1); }

    // What an item takes of the line.
    __device__ int length_of(int tiles) const { return padded ? (tiles + share - 1) / share * share : tiles; }

    // Over all items, of a function of their tiles.
    template <class Function>
    __device__ int sum(Function function) const {
        int total = 0;
        for (int i = threadIdx.x % 32; i < batch; i += 32) total += function(tiles_of(lengths[i]));
        return __reduce_add_sync(~0u, total) * groups;
    }

    const int* lengths;
    const int batch, groups, worker;
    bool padded = false;
    int share, position, left, sequence = 0, group = 0, tile = 0;
};
