// forms_test: instructions at the edges of their types, divergence, and what is refused.

#include <string>
#include <vector>

#include "check.h"
#include "fault.h"
#include "machine.h"
#include "own_tests.h"

namespace pyringar::ptx {

namespace {

// From d0 and d1 to d2; h, w and d are registers of 16, 32 and 64 bits, f and g of floats, p and q
// predicates. w0, w1, h0, h1, f0, f1, g0 and g1 hold what fits of d0 and d1.
struct Case {
  const char* body;
  std::uint64_t a;
  std::uint64_t b;
  std::uint64_t expected;
};

constexpr std::uint64_t kOnes = ~std::uint64_t{0};

const Case kCases[] = {
    // Integers wrap.
    {"add.s32 w2, w0, w1; cvt.u64.u32 d2, w2;", 0x7fffffff, 1, 0x80000000},
    {"sub.s32 w2, w0, w1; cvt.u64.u32 d2, w2;", 0, 1, 0xffffffff},
    {"mul.lo.s32 w2, w0, w1; cvt.u64.u32 d2, w2;", 0x10001, 0x10001, 0x20001},
    {"mul.lo.s16 h2, h0, h1; cvt.u64.u16 d2, h2;", 0xffff, 0xffff, 1},
    {"mul.lo.s64 d2, d0, d1;", kOnes, 3, kOnes - 2},
    {"mul.wide.s32 d2, w0, w1;", 0xffffffff, 3, kOnes - 2},
    {"mul.wide.u32 d2, w0, w1;", 0xffffffff, 3, 0x2fffffffd},
    {"mad.lo.s32 w2, w0, w1, 5; cvt.u64.u32 d2, w2;", 0xffffffff, 3, 2},
    {"add.s16 h2, h0, -1; cvt.u64.u16 d2, h2;", 0, 0, 0xffff},
    {"neg.s64 d2, d0;", 1, 0, kOnes},
    {"not.b32 w2, w0; cvt.u64.u32 d2, w2;", 0xff, 0, 0xffffff00},
    {"min.s16 h2, h0, h1; cvt.u64.u16 d2, h2;", 0x8000, 1, 0x8000},
    {"min.u16 h2, h0, h1; cvt.u64.u16 d2, h2;", 0x8000, 1, 1},
    {"max.s64 d2, d0, d1;", kOnes, 1, 1},
    {"max.u64 d2, d0, d1;", kOnes, 1, kOnes},
    // Divisions go towards zero, and a remainder has the dividend's sign.
    {"div.s32 w2, w0, w1; cvt.u64.u32 d2, w2;", 0xfffffff9, 2, 0xfffffffd},
    {"rem.s32 w2, w0, w1; cvt.u64.u32 d2, w2;", 0xfffffff9, 2, 0xffffffff},
    {"div.u64 d2, d0, d1;", kOnes, 2, kOnes / 2},
    // A shift by more than there is leaves zeroes, or signs.
    {"shl.b32 w2, w0, w1; cvt.u64.u32 d2, w2;", 1, 32, 0},
    {"shr.u32 w2, w0, w1; cvt.u64.u32 d2, w2;", 0x80000000, 33, 0},
    {"shr.s32 w2, w0, w1; cvt.u64.u32 d2, w2;", 0x80000000, 33, 0xffffffff},
    {"shr.s16 h2, h0, 4; cvt.u64.u16 d2, h2;", 0x8000, 0, 0xf800},
    {"shl.b64 d2, d0, 63;", 3, 0, std::uint64_t{1} << 63},
    {"prmt.b32 w2, w0, w1, 0x7610; cvt.u64.u32 d2, w2;", 0x33221100, 0x77665544, 0x77661100},
    {"prmt.b32 w2, w0, w1, 0x9d80; cvt.u64.u32 d2, w2;", 0x00ff8080, 0x0000ff00, 0xffff'ff80},
    // Signs are extended to the register, whatever its size.
    {"cvt.s16.s8 h2, h0; cvt.u64.u16 d2, h2;", 0x1280, 0, 0xff80},
    {"cvt.s64.s32 d2, w0;", 0x80000000, 0, 0xffffffff80000000},
    {"cvt.u64.u32 d2, w0;", 0x80000000, 0, 0x80000000},
    {"cvt.u16.u32 h2, w0; cvt.u64.u16 d2, h2;", 0x12345678, 0, 0x5678},
    {"st.global.u32 [m4], w0; ld.global.s8 w2, [m4]; cvt.u64.u32 d2, w2;", 0x80, 0, 0xffffff80},
    {"st.global.u32 [m4], w0; ld.global.s32 d2, [m4];", 0x80000000, 0, 0xffffffff80000000},
    {"st.global.v2.u32 [m4], {w0, w1}; ld.global.u64 d2, [m4];", 1, 2, 0x200000001},
    {"mov.b64 d2, {w0, w1};", 1, 2, 0x200000001},
    {"mov.b64 {w2, w3}, d0; cvt.u64.u32 d2, w3;", 0x200000001, 0, 2},
    {"mov.b32 {h2, h3}, w0; cvt.u64.u16 d2, h3;", 0x12345678, 0, 0x1234},
    // Floats: to nearest, even; nothing is flushed; a NaN is the one that GPUs give.
    {"add.f32 f2, f0, f1; mov.b32 w2, f2; cvt.u64.u32 d2, w2;", 0x3f800000, 0x33800000, 0x3f800000},
    {"add.f32 f2, f0, f1; mov.b32 w2, f2; cvt.u64.u32 d2, w2;", 0x3f800001, 0x33800000, 0x3f800002},
    {"mul.rn.f32 f2, f0, f1; mov.b32 w2, f2; cvt.u64.u32 d2, w2;", 1, 0x3f800000, 1},
    {"add.f32 f2, f0, f1; mov.b32 w2, f2; cvt.u64.u32 d2, w2;", 0x7f800000, 0xff800000, 0x7fffffff},
    {"add.f64 g2, g0, g1; mov.b64 d2, g2;", 0x7ff8000000000001, 0, 0xfff8000000000000},
    {"div.rn.f32 f2, f0, f1; mov.b32 w2, f2; cvt.u64.u32 d2, w2;", 0x3f800000, 0x40400000,
     0x3eaaaaab},
    {"rcp.rn.f32 f2, f0; mov.b32 w2, f2; cvt.u64.u32 d2, w2;", 0x40400000, 0, 0x3eaaaaab},
    {"cvt.rn.f32.s32 f2, w0; mov.b32 w2, f2; cvt.u64.u32 d2, w2;", 0x1000001, 0, 0x4b800000},
    {"cvt.rn.f16.f32 h2, f0; cvt.u64.u16 d2, h2;", 0x477ff000, 0, 0x7c00},
    {"cvt.rn.f16.f32 h2, f0; cvt.u64.u16 d2, h2;", 0x477fefff, 0, 0x7bff},
    {"cvt.rn.f16.f32 h2, f0; cvt.u64.u16 d2, h2;", 0x33000000, 0, 0},
    {"cvt.rn.f16.f32 h2, f0; cvt.u64.u16 d2, h2;", 0x33000001, 0, 1},
    {"cvt.rn.f16.f32 h2, f0; cvt.u64.u16 d2, h2;", 0xffc00000, 0, 0x7fff},
    {"cvt.f32.f16 f2, h0; mov.b32 w2, f2; cvt.u64.u32 d2, w2;", 0x0001, 0, 0x33800000},
    {"neg.f64 g2, g0; mov.b64 d2, g2;", 0, 0, std::uint64_t{1} << 63},
    {"fma.rn.f64 g2, g0, g1, 0dBFF0000000800000; mov.b64 d2, g2;", 0x3ff0000000400000,
     0x3ff0000000400000, 0x3c30000000000000},
    {"cvt.f64.f32 g2, f0; mov.b64 d2, g2;", 1, 0, 0x36a0000000000000},
    {"cvt.rn.f32.f64 f2, g0; mov.b32 w2, f2; cvt.u64.u32 d2, w2;", 0x36a8000000000000, 0, 2},
    // Comparisons with a NaN are false, but for those that ask for one.
    {"setp.ne.f32 p, f0, f1; selp.u64 d2, 1, 0, p;", 0x7fc00000, 0, 0},
    {"setp.neu.f32 p, f0, f1; selp.u64 d2, 1, 0, p;", 0x7fc00000, 0, 1},
    {"setp.ltu.f32 p, f0, f1; selp.u64 d2, 1, 0, p;", 0x7fc00000, 0, 1},
    {"setp.nan.f32 p, f0, f0; selp.u64 d2, 1, 0, p;", 0x7fc00000, 0, 1},
    {"setp.eq.f32 p, f0, f1; selp.u64 d2, 1, 0, p;", 0x80000000, 0, 1},
    {"setp.lt.s32 p, w0, w1; selp.u64 d2, 1, 0, p;", 0xffffffff, 0, 1},
    {"setp.lt.u32 p, w0, w1; selp.u64 d2, 1, 0, p;", 0xffffffff, 0, 0},
    {"setp.eq.u64 p, d0, d1; not.pred q, p; xor.pred q, q, p; selp.u64 d2, 1, 0, q;", 1, 2, 1},
    {"setp.eq.u64 p, d0, d1; mov.u64 d2, 7; @!p mov.u64 d2, 8;", 1, 1, 7},
    // Lanes that part, and meet again; each has registers of its own.
    {"mov.u32 w2, 0; L1: add.u32 w2, w2, 1; setp.le.u32 p, w2, t; @p bra L1; bar.sync 0;"
     "st.shared.u32 [s], w2; cvt.u64.u32 d2, w2;",
     0, 0, 1},
    {"setp.eq.u32 p, t, 33; bar.red.or.pred q, 0, p; selp.u64 d2, 1, 0, q;", 0, 0, 1},
    {"setp.eq.u32 p, t, 99; bar.red.or.pred q, 0, p; selp.u64 d2, 1, 0, q;", 0, 0, 0},
    {"{ .reg .b32 w2; mov.u32 w2, 5; } mov.u32 w2, 6; cvt.u64.u32 d2, w2;", 0, 0, 6},
};

struct Refused {
  const char* body;
  const char* words;
};

const Refused kRefused[] = {
    {"shfl.sync.idx.b32 w2, w0, 0, 31, -1;", "line 20: unknown instruction shfl.sync.idx.b32"},
    {"ld.global.nc.u32 w2, [m4];", "unknown instruction ld.global.nc.u32"},
    {"fence.sc.gpu;", "unknown instruction fence.sc.gpu"},
    {"ld.acquire.gpu.u64 d2, [m4];", "unknown instruction ld.acquire.gpu.u64"},
    {"mov.u32 w2, %laneid;", "unknown operand %laneid of mov.u32"},
    {".maxnreg 3;", "unknown directive .maxnreg"},
    {"bra NOWHERE;", "no label NOWHERE"},
    {"div.s32 w2, w0, w1;", "a division by zero"},
    {"ld.global.u32 w2, [m4+2];", "its address is not a multiple of 4: memory + 2"},
    {"ld.global.u32 w2, [m4+64];", "reads 4 bytes that are nobody's, at 0 bytes behind memory"},
    {"st.shared.u32 [s+4], w0;", "that are nobody's"},
    {"ld.param.u64 d2, [memory+24];", "is outside of the parameters"},
    {"st.local.u32 [local+4], w0;", "is outside of the thread's local memory"},
    {"st.global.u32 [m4], t;", "a race on memory + 0"},
    {"bar.sync 1;", "number 0 of a whole block alone"},
    {"bar.sync 0, 64;", "number 0 of a whole block alone"},
    {"setp.eq.u32 p, t, 0; @p ret; bar.sync 0;", "for others of their block that have ended"},
    {"L1: ld.acquire.gpu.u32 w2, [m4]; setp.eq.u32 p, w2, 0; @p bra L1;", "nothing moves any more"},
};

constexpr unsigned kNumThreads = 40;  // a warp, and a part of one

std::string text_of(const char* body) {
  return join("", R"(.version 9.0
.shared .align 4 .b8 s[4];
.visible .entry k(.param .u64 memory, .param .u64 a, .param .u64 b)
{
.local .align 4 .b8 local[4];
.reg .b64 m<5>, d<4>; .reg .b32 t, w<4>; .reg .b16 h<4>;
.reg .f32 f<4>; .reg .f64 g<4>; .reg .pred p, q, first;
ld.param.u64 m4, [memory];
ld.param.u64 d0, [a];
ld.param.u64 d1, [b];
cvt.u32.u64 w0, d0;
cvt.u32.u64 w1, d1;
cvt.u16.u64 h0, d0;
cvt.u16.u64 h1, d1;
mov.b32 f0, w0;
mov.b32 f1, w1;
mov.b64 g0, d0;
mov.b64 g1, d1;
mov.u32 t, %tid.x;
)",
              body, R"(
setp.eq.u32 first, t, 0;
@first st.global.u64 [m4+8], d2;
ret;
}
)");
}

// What thread 0 stored, with inputs that thread 0 alone has where stores would race.
std::uint64_t result_of(const char* body, std::uint64_t a, std::uint64_t b, unsigned num_threads) {
  Module module("a form", text_of(body));
  alignas(16) std::uint64_t memory[8] = {};
  RandomChooser chooser(1, 4);
  Machine machine(chooser);
  machine.memory().add_region(memory, sizeof memory, "memory");
  const std::uint64_t parameters[] = {reinterpret_cast<std::uintptr_t>(memory), a, b};
  const auto* const bytes = reinterpret_cast<const std::byte*>(parameters);
  machine.enqueue(0, {&module.kernel("k"),
                      "launch",
                      "a form",
                      1,
                      num_threads,
                      0,
                      true,
                      {bytes, bytes + sizeof parameters}});
  machine.run();
  return memory[1];
}

}  // namespace

void forms_round(stress::Random&) {
  for (const Case& of : kCases) {
    const std::string_view body = of.body;
    // What stores for all threads would be a race.
    const bool stores = body.find("st.") != std::string_view::npos;
    const unsigned num_threads = stores ? 1 : kNumThreads;
    const std::uint64_t found = result_of(of.body, of.a, of.b, num_threads);
    CHECK(found == of.expected, of.body, " of ", of.a, " and ", of.b, " gave ", found,
          ", expected ", of.expected);
  }
  for (const Refused& of : kRefused) {
    std::string said = "nothing";
    try {
      result_of(of.body, 0, 0, kNumThreads);
    } catch (const Fault& fault) {
      said = fault.what();
    }
    CHECK(said.find(of.words) != std::string::npos, of.body, " said ", said);
  }
}

}  // namespace pyringar::ptx
