// What all rows of a head share when tokens are replayed: keys, queries and gates, and from them the weights with which
// values and reads of the state make up outputs. See replay.cu.
#pragma once
#include "early.cuh"

constexpr int D_K = 128, D_V = 128;
constexpr int WARPS = 4, SHARE = 32 * WARPS;        // that hold rows; or that prepare weights
constexpr int THREADS = APART ? 2 * SHARE : SHARE;  // others do the one and the other, or the same in turn
constexpr int ROWS = 8 * WARPS * GROUPS;            // of a block: a warp has GROUPS times eight
constexpr int TILES = D_V / ROWS;
constexpr int K_HEADS = V_HEADS / GROUP;
constexpr int KEPT = 8, NEW = 4, TOKENS = KEPT + NEW, ALL = TOKENS + NEW;  // places; queries are the last four
constexpr int PITCH = D_K + 8;                                             // of keys: no bank conflicts
constexpr float NORM_EPS = 1e-6f;
using i64 = long long;

// Of 16 columns of S, a lane holds four neighbours, 4 t to 4 t + 3 with t = lane % 4. A fragment wants places 2 t,
// 2 t + 1, 2 t + 8 and 2 t + 9: so keys lie in shared memory with their columns in this order.
struct Shared {
    alignas(16) u16 keys[ALL][PITCH];
    alignas(16) u16 values[TOKENS][ROWS];
    float gram[WARPS][ALL][ALL + 2];   // each warp's share of the sum over d_k
    alignas(16) float decays[TOKENS];  // logs
    float strengths[TOKENS];
    alignas(16) float columns[TOKENS][TOKENS];          // [i][j]: what d_i adds to d_j
    alignas(16) float targets[TOKENS][TOKENS];          // in terms of d: kept tokens in the end, and the queries
    alignas(16) float from_value[TOKENS];               // what v_j adds to d_j
    alignas(16) float from_read[ALL];                   // what S k_j adds to d_j, or S q_j to its output
    alignas(16) float weights[TOKENS][2 * TOKENS + 4];  // targets in terms of values and of S k_j
    alignas(16) float reads[WARPS][8][ALL + 4];         // rows times keys and queries
    float whole;                                        // decay over all kept tokens
};

// Four matrices of 8 x 8, a row at the address of each lane.
__device__ __forceinline__ void load_matrices(u32 (&m)[4], const u16* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(shared_address(row)));
}
__device__ __forceinline__ void load_transposed(u32 (&m)[4], const u16* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(shared_address(row)));
}

// All keys and queries at step s as a fragment of 16 rows.
__device__ __forceinline__ void load_keys(u32 (&a)[4], const Shared& sh, int s, int lane) {
    load_matrices(a, &sh.keys[lane % 16][16 * s + lane / 16 * 8]);
}

// The warp's share of the products of all keys and queries.
__device__ __forceinline__ void multiply_keys(Shared& sh, int warp, int lane) {
    float c[2][4] = {};
#pragma unroll
    for (int s = 2 * warp; s < 2 * warp + 2; s++) {
        u32 keys[4];
        load_keys(keys, sh, s, lane);
        mma_bf16(c[0], keys, keys[0], keys[2]);
        mma_bf16(c[1], keys, keys[1], keys[3]);
    }
    const int m = lane / 4, n = lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        *reinterpret_cast<float2*>(&sh.gram[warp][m][8 * half + n]) = {c[half][0], c[half][1]};
        *reinterpret_cast<float2*>(&sh.gram[warp][m + 8][8 * half + n]) = {c[half][2], c[half][3]};
    }
}

__device__ __forceinline__ float product(const Shared& sh, int m, int n) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += sh.gram[w][m][n];
    return sum;
}

// Eight threads share row j of the system, a token or a query: each has columns i and i + 8.
struct Equation {
    int j, token;
    float decay[2], all;  // from token i, or from the start, to this one

    __device__ __forceinline__ explicit Equation(const Shared& sh) {
        j = threadIdx.x % SHARE / 8, token = j < TOKENS ? j : j - NEW;
        float logs[TOKENS], log[2] = {0, 0}, sum = 0;
#pragma unroll
        for (int m = 0; m < TOKENS; m++) {
            logs[m] = m <= token ? sh.decays[m] : 0.0f;
            sum += logs[m];
            log[0] += m > column() ? logs[m] : 0.0f;
            log[1] += m > column() + 8 ? logs[m] : 0.0f;
        }
        decay[0] = __expf(log[0]), decay[1] = __expf(log[1]), all = __expf(sum);
    }
    __device__ __forceinline__ static int column() { return threadIdx.x % 8; }

    __device__ __forceinline__ void write(Shared& sh, float scale) const {
        const bool query = j >= TOKENS;
        const float length = NORMALISE ? rsqrtf(product(sh, j, j) + NORM_EPS) : 1.0f;
        const float strength = query ? 0.0f : sh.strengths[token];
        // d_i goes with keys as they came; `length` makes them of unit length.
        const float factor = query ? length * scale : -strength * length * length;
#pragma unroll
        for (int part = 0; part < 2; part++) {
            const int i = column() + 8 * part;
            const float value = i < token || (query && i == token) ? factor * decay[part] * product(sh, j, i) : 0.0f;
            if (i < TOKENS) {
                if (query) sh.targets[j - NEW][i] = value;
                else sh.columns[i][j] = value;
                if (j < KEPT && i != j) sh.targets[j][i] = 0;
            }
            if (j == KEPT - 1 && part == 0) sh.targets[i][i] = decay[0];
        }
        if (column() == 0) sh.from_read[j] = factor * all;
        if (column() == 1 && !query) sh.from_value[j] = strength * length;
        if (column() == 2 && j == KEPT - 1) sh.whole = all;
    }
};

// Target r in terms of values and reads, by lane r: its row x of the inverse is x = target + x columns, from the last.
__device__ __forceinline__ void solve(Shared& sh, int r) {
    float x[TOKENS];
#pragma unroll
    for (int j = TOKENS - 1; j >= 0; j--) {
        x[j] = sh.targets[r][j];
#pragma unroll
        for (int i = TOKENS - 1; i > j; i--) x[j] += x[i] * sh.columns[j][i];
    }
    float* weights = sh.weights[r];
#pragma unroll
    for (int j = 0; j < TOKENS; j++) {
        weights[j] = x[j] * sh.from_value[j];
        weights[TOKENS + j] = x[j] * sh.from_read[j];
    }
}
