// Hopper's asynchronous tensor-core products of a warpgroup, 128 threads (`wgmma`): 64 x N outputs and 32 bytes of K,
// f32 += 16 bits x 16 bits or e4m3 x e4m3, or s32 += s8 x s8, operands in shared memory. Outputs lie in registers as those of `mma`.
#pragma once

#include "common/base.cuh"

namespace fused {

#define WGMMA_8(KIND, OPERATION, ARGUMENTS, ...) \
  asm volatile( \
      OPERATION " {%0, %1, %2, %3}, " ARGUMENTS \
      : KIND(d[0]), KIND(d[1]), KIND(d[2]), KIND(d[3]) : __VA_ARGS__)
#define WGMMA_16(KIND, OPERATION, ARGUMENTS, ...) \
  asm volatile( \
      OPERATION " {%0, %1, %2, %3, %4, %5, %6, %7}, " ARGUMENTS \
      : KIND(d[0]), KIND(d[1]), KIND(d[2]), KIND(d[3]), KIND(d[4]), KIND(d[5]), KIND(d[6]), KIND(d[7]) : __VA_ARGS__)
#define WGMMA_32(KIND, OPERATION, ARGUMENTS, ...) \
  asm volatile( \
      OPERATION " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, " ARGUMENTS \
      : KIND(d[0]), KIND(d[1]), KIND(d[2]), KIND(d[3]), KIND(d[4]), KIND(d[5]), KIND(d[6]), KIND(d[7]), KIND(d[8]), KIND(d[9]), KIND(d[10]), KIND(d[11]), KIND(d[12]), KIND(d[13]), KIND(d[14]), KIND(d[15]) : __VA_ARGS__)

#define WGMMA_48(KIND, OPERATION, ARGUMENTS, ...)                                                       \
  asm volatile(                                                                                         \
      OPERATION " {"                                                                                    \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
      "%21, %22, %23"                                                                                   \
      "}, " ARGUMENTS                                                                                   \
      : KIND(d[0]), KIND(d[1]), KIND(d[2]), KIND(d[3]), KIND(d[4]), KIND(d[5]), KIND(d[6]), KIND(d[7]), \
        KIND(d[8]), KIND(d[9]), KIND(d[10]), KIND(d[11]), KIND(d[12]), KIND(d[13]), KIND(d[14]),        \
        KIND(d[15]), KIND(d[16]), KIND(d[17]), KIND(d[18]), KIND(d[19]), KIND(d[20]), KIND(d[21]),      \
        KIND(d[22]), KIND(d[23])                                                                        \
      : __VA_ARGS__)

#define WGMMA_64(KIND, OPERATION, ARGUMENTS, ...)                                                       \
  asm volatile(                                                                                         \
      OPERATION " {"                                                                                    \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
      "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"                                           \
      "}, " ARGUMENTS                                                                                   \
      : KIND(d[0]), KIND(d[1]), KIND(d[2]), KIND(d[3]), KIND(d[4]), KIND(d[5]), KIND(d[6]), KIND(d[7]), \
        KIND(d[8]), KIND(d[9]), KIND(d[10]), KIND(d[11]), KIND(d[12]), KIND(d[13]), KIND(d[14]),        \
        KIND(d[15]), KIND(d[16]), KIND(d[17]), KIND(d[18]), KIND(d[19]), KIND(d[20]), KIND(d[21]),      \
        KIND(d[22]), KIND(d[23]), KIND(d[24]), KIND(d[25]), KIND(d[26]), KIND(d[27]), KIND(d[28]),      \
        KIND(d[29]), KIND(d[30]), KIND(d[31])                                                           \
      : __VA_ARGS__)

#define WGMMA_80(KIND, OPERATION, ARGUMENTS, ...)                                                       \
  asm volatile(                                                                                         \
      OPERATION " {"                                                                                    \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
      "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39"   \
      "}, " ARGUMENTS                                                                                   \
      : KIND(d[0]), KIND(d[1]), KIND(d[2]), KIND(d[3]), KIND(d[4]), KIND(d[5]), KIND(d[6]), KIND(d[7]), \
        KIND(d[8]), KIND(d[9]), KIND(d[10]), KIND(d[11]), KIND(d[12]), KIND(d[13]), KIND(d[14]),        \
        KIND(d[15]), KIND(d[16]), KIND(d[17]), KIND(d[18]), KIND(d[19]), KIND(d[20]), KIND(d[21]),      \
        KIND(d[22]), KIND(d[23]), KIND(d[24]), KIND(d[25]), KIND(d[26]), KIND(d[27]), KIND(d[28]),      \
        KIND(d[29]), KIND(d[30]), KIND(d[31]), KIND(d[32]), KIND(d[33]), KIND(d[34]), KIND(d[35]),      \
        KIND(d[36]), KIND(d[37]), KIND(d[38]), KIND(d[39])                                              \
      : __VA_ARGS__)

#define WGMMA_96(KIND, OPERATION, ARGUMENTS, ...)                                                       \
  asm volatile(                                                                                         \
      OPERATION " {"                                                                                    \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
      "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, " \
      "%40, %41, %42, %43, %44, %45, %46, %47"                                                          \
      "}, " ARGUMENTS                                                                                   \
      : KIND(d[0]), KIND(d[1]), KIND(d[2]), KIND(d[3]), KIND(d[4]), KIND(d[5]), KIND(d[6]), KIND(d[7]), \
        KIND(d[8]), KIND(d[9]), KIND(d[10]), KIND(d[11]), KIND(d[12]), KIND(d[13]), KIND(d[14]),        \
        KIND(d[15]), KIND(d[16]), KIND(d[17]), KIND(d[18]), KIND(d[19]), KIND(d[20]), KIND(d[21]),      \
        KIND(d[22]), KIND(d[23]), KIND(d[24]), KIND(d[25]), KIND(d[26]), KIND(d[27]), KIND(d[28]),      \
        KIND(d[29]), KIND(d[30]), KIND(d[31]), KIND(d[32]), KIND(d[33]), KIND(d[34]), KIND(d[35]),      \
        KIND(d[36]), KIND(d[37]), KIND(d[38]), KIND(d[39]), KIND(d[40]), KIND(d[41]), KIND(d[42]),      \
        KIND(d[43]), KIND(d[44]), KIND(d[45]), KIND(d[46]), KIND(d[47])                                 \
      : __VA_ARGS__)

#define WGMMA_128(KIND, OPERATION, ARGUMENTS, ...)                                                      \
  asm volatile(                                                                                         \
      OPERATION " {"                                                                                    \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
      "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, " \
      "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, " \
      "%59, %60, %61, %62, %63"                                                                         \
      "}, " ARGUMENTS                                                                                   \
      : KIND(d[0]), KIND(d[1]), KIND(d[2]), KIND(d[3]), KIND(d[4]), KIND(d[5]), KIND(d[6]), KIND(d[7]), \
        KIND(d[8]), KIND(d[9]), KIND(d[10]), KIND(d[11]), KIND(d[12]), KIND(d[13]), KIND(d[14]),        \
        KIND(d[15]), KIND(d[16]), KIND(d[17]), KIND(d[18]), KIND(d[19]), KIND(d[20]), KIND(d[21]),      \
        KIND(d[22]), KIND(d[23]), KIND(d[24]), KIND(d[25]), KIND(d[26]), KIND(d[27]), KIND(d[28]),      \
        KIND(d[29]), KIND(d[30]), KIND(d[31]), KIND(d[32]), KIND(d[33]), KIND(d[34]), KIND(d[35]),      \
        KIND(d[36]), KIND(d[37]), KIND(d[38]), KIND(d[39]), KIND(d[40]), KIND(d[41]), KIND(d[42]),      \
        KIND(d[43]), KIND(d[44]), KIND(d[45]), KIND(d[46]), KIND(d[47]), KIND(d[48]), KIND(d[49]),      \
        KIND(d[50]), KIND(d[51]), KIND(d[52]), KIND(d[53]), KIND(d[54]), KIND(d[55]), KIND(d[56]),      \
        KIND(d[57]), KIND(d[58]), KIND(d[59]), KIND(d[60]), KIND(d[61]), KIND(d[62]), KIND(d[63])       \
      : __VA_ARGS__)

#define WGMMA_144(KIND, OPERATION, ARGUMENTS, ...)                                            \
  asm volatile(                                                                               \
      OPERATION " {"                                                                          \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, " \
      "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, " \
      "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, " \
      "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, " \
      "%70, %71"                                                                              \
      "}, " ARGUMENTS                                                                         \
      : KIND(d[0]), KIND(d[1]), KIND(d[2]), KIND(d[3]), KIND(d[4]), KIND(d[5]), KIND(d[6]),   \
        KIND(d[7]), KIND(d[8]), KIND(d[9]), KIND(d[10]), KIND(d[11]), KIND(d[12]),            \
        KIND(d[13]), KIND(d[14]), KIND(d[15]), KIND(d[16]), KIND(d[17]), KIND(d[18]),         \
        KIND(d[19]), KIND(d[20]), KIND(d[21]), KIND(d[22]), KIND(d[23]), KIND(d[24]),         \
        KIND(d[25]), KIND(d[26]), KIND(d[27]), KIND(d[28]), KIND(d[29]), KIND(d[30]),         \
        KIND(d[31]), KIND(d[32]), KIND(d[33]), KIND(d[34]), KIND(d[35]), KIND(d[36]),         \
        KIND(d[37]), KIND(d[38]), KIND(d[39]), KIND(d[40]), KIND(d[41]), KIND(d[42]),         \
        KIND(d[43]), KIND(d[44]), KIND(d[45]), KIND(d[46]), KIND(d[47]), KIND(d[48]),         \
        KIND(d[49]), KIND(d[50]), KIND(d[51]), KIND(d[52]), KIND(d[53]), KIND(d[54]),         \
        KIND(d[55]), KIND(d[56]), KIND(d[57]), KIND(d[58]), KIND(d[59]), KIND(d[60]),         \
        KIND(d[61]), KIND(d[62]), KIND(d[63]), KIND(d[64]), KIND(d[65]), KIND(d[66]),         \
        KIND(d[67]), KIND(d[68]), KIND(d[69]), KIND(d[70]), KIND(d[71])                       \
      : __VA_ARGS__)

#define WGMMA_192(KIND, OPERATION, ARGUMENTS, ...)                                                 \
  asm volatile(                                                                                    \
      OPERATION " {"                                                                               \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
      "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, " \
      "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, " \
      "%56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, " \
      "%74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, " \
      "%92, %93, %94, %95"                                                                         \
      "}, " ARGUMENTS                                                                              \
      : KIND(d[0]), KIND(d[1]), KIND(d[2]), KIND(d[3]), KIND(d[4]), KIND(d[5]), KIND(d[6]),        \
        KIND(d[7]), KIND(d[8]), KIND(d[9]), KIND(d[10]), KIND(d[11]), KIND(d[12]), KIND(d[13]),    \
        KIND(d[14]), KIND(d[15]), KIND(d[16]), KIND(d[17]), KIND(d[18]), KIND(d[19]),              \
        KIND(d[20]), KIND(d[21]), KIND(d[22]), KIND(d[23]), KIND(d[24]), KIND(d[25]),              \
        KIND(d[26]), KIND(d[27]), KIND(d[28]), KIND(d[29]), KIND(d[30]), KIND(d[31]),              \
        KIND(d[32]), KIND(d[33]), KIND(d[34]), KIND(d[35]), KIND(d[36]), KIND(d[37]),              \
        KIND(d[38]), KIND(d[39]), KIND(d[40]), KIND(d[41]), KIND(d[42]), KIND(d[43]),              \
        KIND(d[44]), KIND(d[45]), KIND(d[46]), KIND(d[47]), KIND(d[48]), KIND(d[49]),              \
        KIND(d[50]), KIND(d[51]), KIND(d[52]), KIND(d[53]), KIND(d[54]), KIND(d[55]),              \
        KIND(d[56]), KIND(d[57]), KIND(d[58]), KIND(d[59]), KIND(d[60]), KIND(d[61]),              \
        KIND(d[62]), KIND(d[63]), KIND(d[64]), KIND(d[65]), KIND(d[66]), KIND(d[67]),              \
        KIND(d[68]), KIND(d[69]), KIND(d[70]), KIND(d[71]), KIND(d[72]), KIND(d[73]),              \
        KIND(d[74]), KIND(d[75]), KIND(d[76]), KIND(d[77]), KIND(d[78]), KIND(d[79]),              \
        KIND(d[80]), KIND(d[81]), KIND(d[82]), KIND(d[83]), KIND(d[84]), KIND(d[85]),              \
        KIND(d[86]), KIND(d[87]), KIND(d[88]), KIND(d[89]), KIND(d[90]), KIND(d[91]),              \
        KIND(d[92]), KIND(d[93]), KIND(d[94]), KIND(d[95])                                         \
      : __VA_ARGS__)

#define WGMMA_256(KIND, OPERATION, ARGUMENTS, ...)                                                        \
  asm volatile(                                                                                           \
      OPERATION " {"                                                                                      \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "   \
      "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "   \
      "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, "   \
      "%59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, "   \
      "%78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, "   \
      "%97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, "     \
      "%113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"          \
      "}, " ARGUMENTS                                                                                     \
      : KIND(d[0]), KIND(d[1]), KIND(d[2]), KIND(d[3]), KIND(d[4]), KIND(d[5]), KIND(d[6]), KIND(d[7]),   \
        KIND(d[8]), KIND(d[9]), KIND(d[10]), KIND(d[11]), KIND(d[12]), KIND(d[13]), KIND(d[14]),          \
        KIND(d[15]), KIND(d[16]), KIND(d[17]), KIND(d[18]), KIND(d[19]), KIND(d[20]), KIND(d[21]),        \
        KIND(d[22]), KIND(d[23]), KIND(d[24]), KIND(d[25]), KIND(d[26]), KIND(d[27]), KIND(d[28]),        \
        KIND(d[29]), KIND(d[30]), KIND(d[31]), KIND(d[32]), KIND(d[33]), KIND(d[34]), KIND(d[35]),        \
        KIND(d[36]), KIND(d[37]), KIND(d[38]), KIND(d[39]), KIND(d[40]), KIND(d[41]), KIND(d[42]),        \
        KIND(d[43]), KIND(d[44]), KIND(d[45]), KIND(d[46]), KIND(d[47]), KIND(d[48]), KIND(d[49]),        \
        KIND(d[50]), KIND(d[51]), KIND(d[52]), KIND(d[53]), KIND(d[54]), KIND(d[55]), KIND(d[56]),        \
        KIND(d[57]), KIND(d[58]), KIND(d[59]), KIND(d[60]), KIND(d[61]), KIND(d[62]), KIND(d[63]),        \
        KIND(d[64]), KIND(d[65]), KIND(d[66]), KIND(d[67]), KIND(d[68]), KIND(d[69]), KIND(d[70]),        \
        KIND(d[71]), KIND(d[72]), KIND(d[73]), KIND(d[74]), KIND(d[75]), KIND(d[76]), KIND(d[77]),        \
        KIND(d[78]), KIND(d[79]), KIND(d[80]), KIND(d[81]), KIND(d[82]), KIND(d[83]), KIND(d[84]),        \
        KIND(d[85]), KIND(d[86]), KIND(d[87]), KIND(d[88]), KIND(d[89]), KIND(d[90]), KIND(d[91]),        \
        KIND(d[92]), KIND(d[93]), KIND(d[94]), KIND(d[95]), KIND(d[96]), KIND(d[97]), KIND(d[98]),        \
        KIND(d[99]), KIND(d[100]), KIND(d[101]), KIND(d[102]), KIND(d[103]), KIND(d[104]), KIND(d[105]),  \
        KIND(d[106]), KIND(d[107]), KIND(d[108]), KIND(d[109]), KIND(d[110]), KIND(d[111]), KIND(d[112]), \
        KIND(d[113]), KIND(d[114]), KIND(d[115]), KIND(d[116]), KIND(d[117]), KIND(d[118]), KIND(d[119]), \
        KIND(d[120]), KIND(d[121]), KIND(d[122]), KIND(d[123]), KIND(d[124]), KIND(d[125]), KIND(d[126]), \
        KIND(d[127])                                                                                      \
      : __VA_ARGS__)

// The descriptor of a matrix in shared memory, in rows of SWIZZLE bytes as a bulk copy lays them. `between_pieces`, the
// bytes from such a piece to the next, matters only where a product takes more than one; `between_groups` are those from
// 8 rows to the next 8, which follow one another unless it says otherwise.
template <int SWIZZLE>
__device__ __forceinline__ uint64_t descriptor(uint32_t at, int between_pieces, int between_groups = 8 * SWIZZLE) {
  constexpr uint64_t KIND = SWIZZLE == 128 ? 1 : SWIZZLE == 64 ? 2 : 3;
  return uint64_t((at & 0x3ffff) >> 4) | uint64_t(between_pieces >> 4) << 16 |
         uint64_t(between_groups >> 4) << 32 | KIND << 62;
}
// The lower half of it, to which a sixteenth of a distance in bytes may be added, and the whole of such a half.
__device__ __forceinline__ uint32_t descriptor_low(uint32_t at, int between_pieces) {
  return static_cast<uint32_t>(descriptor<128>(at, between_pieces));
}
__device__ __forceinline__ uint64_t descriptor_at(uint32_t low) {
  return descriptor<128>(0, 0) | low;
}

// The first factor in shared memory too, both with consecutive summands to a row. The result starts
// from zero if `add` is 0.
__device__ __forceinline__ void wgmma(int (&d)[24], uint64_t a, uint64_t b, int add) {
  WGMMA_48("+r", "{.reg .pred p; setp.ne.b32 p, %26, 0;\n wgmma.mma_async.sync.aligned.m64n48k32.s32.s8.s8",
    "%24, %25, p;}", "l"(a), "l"(b), "r"(add));
}
__device__ __forceinline__ void wgmma(int (&d)[32], uint64_t a, uint64_t b, int add) {
  WGMMA_64("+r", "{.reg .pred p; setp.ne.b32 p, %34, 0;\n wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8",
    "%32, %33, p;}", "l"(a), "l"(b), "r"(add));
}
__device__ __forceinline__ void wgmma(int (&d)[48], uint64_t a, uint64_t b, int add) {
  WGMMA_96("+r", "{.reg .pred p; setp.ne.b32 p, %50, 0;\n wgmma.mma_async.sync.aligned.m64n96k32.s32.s8.s8",
    "%48, %49, p;}", "l"(a), "l"(b), "r"(add));
}
__device__ __forceinline__ void wgmma(int (&d)[64], uint64_t a, uint64_t b, int add) {
  WGMMA_128("+r", "{.reg .pred p; setp.ne.b32 p, %66, 0;\n wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8",
    "%64, %65, p;}", "l"(a), "l"(b), "r"(add));
}
__device__ __forceinline__ void wgmma(int (&d)[72], uint64_t a, uint64_t b, int add) {
  WGMMA_144("+r", "{.reg .pred p; setp.ne.b32 p, %74, 0;\n wgmma.mma_async.sync.aligned.m64n144k32.s32.s8.s8",
    "%72, %73, p;}", "l"(a), "l"(b), "r"(add));
}
__device__ __forceinline__ void wgmma(int (&d)[96], uint64_t a, uint64_t b, int add) {
  WGMMA_192("+r", "{.reg .pred p; setp.ne.b32 p, %98, 0;\n wgmma.mma_async.sync.aligned.m64n192k32.s32.s8.s8",
    "%96, %97, p;}", "l"(a), "l"(b), "r"(add));
}
__device__ __forceinline__ void wgmma(int (&d)[128], uint64_t a, uint64_t b, int add) {
  WGMMA_256("+r", "{.reg .pred p; setp.ne.b32 p, %130, 0;\n wgmma.mma_async.sync.aligned.m64n256k32.s32.s8.s8",
    "%128, %129, p;}", "l"(a), "l"(b), "r"(add));
}
// Of e4m3. The tensor cores' own sums have some 14 bits: those of many values are to be added up in f32.
__device__ __forceinline__ void wgmma(float (&d)[64], uint64_t a, uint64_t b, int add) {
  WGMMA_128("+f", "{.reg .pred p; setp.ne.b32 p, %66, 0;\n wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3",
    "%64, %65, p, 1, 1;}", "l"(a), "l"(b), "r"(add));
}
__device__ __forceinline__ void wgmma(__half, float (&d)[32], uint64_t a, uint64_t b, int add) {
  WGMMA_64("+f", "{.reg .pred p; setp.ne.b32 p, %34, 0;\n wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16",
    "%32, %33, p, 1, 1, 0, 0;}", "l"(a), "l"(b), "r"(add));
}
__device__ __forceinline__ void wgmma(__nv_bfloat16, float (&d)[32], uint64_t a, uint64_t b, int add) {
  WGMMA_64("+f", "{.reg .pred p; setp.ne.b32 p, %34, 0;\n wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16",
    "%32, %33, p, 1, 1, 0, 0;}", "l"(a), "l"(b), "r"(add));
}
__device__ __forceinline__ void wgmma(__half, float (&d)[40], uint64_t a, uint64_t b, int add) {
  WGMMA_80("+f", "{.reg .pred p; setp.ne.b32 p, %42, 0;\n wgmma.mma_async.sync.aligned.m64n80k16.f32.f16.f16",
    "%40, %41, p, 1, 1, 0, 0;}", "l"(a), "l"(b), "r"(add));
}
__device__ __forceinline__ void wgmma(__nv_bfloat16, float (&d)[40], uint64_t a, uint64_t b, int add) {
  WGMMA_80("+f", "{.reg .pred p; setp.ne.b32 p, %42, 0;\n wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16",
    "%40, %41, p, 1, 1, 0, 0;}", "l"(a), "l"(b), "r"(add));
}
__device__ __forceinline__ void wgmma(__half, float (&d)[64], uint64_t a, uint64_t b, int add) {
  WGMMA_128("+f", "{.reg .pred p; setp.ne.b32 p, %66, 0;\n wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16",
    "%64, %65, p, 1, 1, 0, 0;}", "l"(a), "l"(b), "r"(add));
}
__device__ __forceinline__ void wgmma(__nv_bfloat16, float (&d)[64], uint64_t a, uint64_t b, int add) {
  WGMMA_128("+f", "{.reg .pred p; setp.ne.b32 p, %66, 0;\n wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16",
    "%64, %65, p, 1, 1, 0, 0;}", "l"(a), "l"(b), "r"(add));
}

// Further widths of it: N rows of the second factor; operands A, B and ADD come behind N / 2 sums.
#define WGMMA_SHARED(N, A, B, ADD)              \
  WGMMA_SHARED_OF(N, A, B, ADD, __half, "f16")  \
  WGMMA_SHARED_OF(N, A, B, ADD, __nv_bfloat16, "bf16")
#define WGMMA_SHARED_OF(N, A, B, ADD, TYPE, NAME)                                                                    \
  __device__ __forceinline__ void wgmma(TYPE, float (&d)[N / 2], uint64_t a, uint64_t b, int add) {                  \
    WGMMA_##N("+f",                                                                                                  \
              "{.reg .pred p; setp.ne.b32 p, %" #ADD ", 0;\n wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME   \
              "." NAME, "%" #A ", %" #B ", p, 1, 1, 0, 0;}", "l"(a), "l"(b), "r"(add));                              \
  }
WGMMA_SHARED(8, 4, 5, 6)
WGMMA_SHARED(16, 8, 9, 10)
WGMMA_SHARED(32, 16, 17, 18)

// The first factor in registers, the second with one summand to a row.
__device__ __forceinline__ void wgmma(__half, float (&d)[32], const uint32_t* a, uint64_t b, int add) {
  WGMMA_64("+f", "{.reg .pred p; setp.ne.b32 p, %37, 0;\n wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16",
    "{%32, %33, %34, %35}, %36, p, 1, 1, 1;}",
    "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
__device__ __forceinline__ void wgmma(__nv_bfloat16, float (&d)[32], const uint32_t* a, uint64_t b, int add) {
  WGMMA_64("+f", "{.reg .pred p; setp.ne.b32 p, %37, 0;\n wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16",
    "{%32, %33, %34, %35}, %36, p, 1, 1, 1;}",
    "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
__device__ __forceinline__ void wgmma(__half, float (&d)[40], const uint32_t* a, uint64_t b, int add) {
  WGMMA_80("+f", "{.reg .pred p; setp.ne.b32 p, %45, 0;\n wgmma.mma_async.sync.aligned.m64n80k16.f32.f16.f16",
    "{%40, %41, %42, %43}, %44, p, 1, 1, 1;}",
    "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
__device__ __forceinline__ void wgmma(__nv_bfloat16, float (&d)[40], const uint32_t* a, uint64_t b, int add) {
  WGMMA_80("+f", "{.reg .pred p; setp.ne.b32 p, %45, 0;\n wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16",
    "{%40, %41, %42, %43}, %44, p, 1, 1, 1;}",
    "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
__device__ __forceinline__ void wgmma(__half, float (&d)[48], const uint32_t* a, uint64_t b, int add) {
  WGMMA_96("+f", "{.reg .pred p; setp.ne.b32 p, %53, 0;\n wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16",
    "{%48, %49, %50, %51}, %52, p, 1, 1, 1;}",
    "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
__device__ __forceinline__ void wgmma(__nv_bfloat16, float (&d)[48], const uint32_t* a, uint64_t b, int add) {
  WGMMA_96("+f", "{.reg .pred p; setp.ne.b32 p, %53, 0;\n wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16",
    "{%48, %49, %50, %51}, %52, p, 1, 1, 1;}",
    "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
__device__ __forceinline__ void wgmma(__half, float (&d)[64], const uint32_t* a, uint64_t b, int add) {
  WGMMA_128("+f", "{.reg .pred p; setp.ne.b32 p, %69, 0;\n wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16",
    "{%64, %65, %66, %67}, %68, p, 1, 1, 1;}",
    "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
__device__ __forceinline__ void wgmma(__nv_bfloat16, float (&d)[64], const uint32_t* a, uint64_t b, int add) {
  WGMMA_128("+f", "{.reg .pred p; setp.ne.b32 p, %69, 0;\n wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16",
    "{%64, %65, %66, %67}, %68, p, 1, 1, 1;}",
    "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
__device__ __forceinline__ void wgmma(__half, float (&d)[128], const uint32_t* a, uint64_t b, int add) {
  WGMMA_256("+f", "{.reg .pred p; setp.ne.b32 p, %133, 0;\n wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16",
    "{%128, %129, %130, %131}, %132, p, 1, 1, 1;}",
    "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
__device__ __forceinline__ void wgmma(__nv_bfloat16, float (&d)[128], const uint32_t* a, uint64_t b, int add) {
  WGMMA_256("+f", "{.reg .pred p; setp.ne.b32 p, %133, 0;\n wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16",
    "{%128, %129, %130, %131}, %132, p, 1, 1, 1;}",
    "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

// The first factor in registers, the second with consecutive summands to a row.
__device__ __forceinline__ void wgmma_k_major(float (&d)[8], const uint32_t* a, uint64_t b, int add) {
  WGMMA_16("+f", "{.reg .pred p; setp.ne.b32 p, %13, 0;\n wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16",
    "{%8, %9, %10, %11}, %12, p, 1, 1, 0;}", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
__device__ __forceinline__ void wgmma_k_major(float (&d)[16], const uint32_t* a, uint64_t b, int add) {
  WGMMA_32("+f", "{.reg .pred p; setp.ne.b32 p, %21, 0;\n wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16",
    "{%16, %17, %18, %19}, %20, p, 1, 1, 0;}", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
__device__ __forceinline__ void wgmma_k_major(float (&d)[32], const uint32_t* a, uint64_t b, int add) {
  WGMMA_64("+f", "{.reg .pred p; setp.ne.b32 p, %37, 0;\n wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16",
    "{%32, %33, %34, %35}, %36, p, 1, 1, 0;}", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
__device__ __forceinline__ void wgmma_k_major(float (&d)[64], const uint32_t* a, uint64_t b, int add) {
  WGMMA_128("+f", "{.reg .pred p; setp.ne.b32 p, %69, 0;\n wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16",
    "{%64, %65, %66, %67}, %68, p, 1, 1, 0;}", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
__device__ __forceinline__ void wgmma_k_major(float (&d)[96], const uint32_t* a, uint64_t b, int add) {
  WGMMA_192("+f", "{.reg .pred p; setp.ne.b32 p, %101, 0;\n wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16",
    "{%96, %97, %98, %99}, %100, p, 1, 1, 0;}", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
__device__ __forceinline__ void wgmma_k_major(float (&d)[128], const uint32_t* a, uint64_t b, int add) {
  WGMMA_256("+f", "{.reg .pred p; setp.ne.b32 p, %133, 0;\n wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16",
    "{%128, %129, %130, %131}, %132, p, 1, 1, 0;}", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
__device__ __forceinline__ void wgmma_k_major(float (&d)[4], const uint32_t* a, uint64_t b, int add) {
  WGMMA_8("+f", "{.reg .pred p; setp.ne.b32 p, %9, 0;\n wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16",
    "{%4, %5, %6, %7}, %8, p, 1, 1, 0;}", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until all but the last N committed groups are done.
template <int N> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Nothing that follows may use the registers before this point, where they are complete.
template <int N> __device__ __forceinline__ void settle(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int N> __device__ __forceinline__ void settle(int (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

}  // namespace fused

