// forms: see the header.

#include "forms.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <tuple>
#include <type_traits>
#include <unordered_map>

#include "fault.h"

namespace pyringar::ptx {

namespace {

using f16 = _Float16;
using f32 = float;
using f64 = double;
using s8 = std::int8_t;
using s16 = std::int16_t;
using s32 = std::int32_t;
using s64 = std::int64_t;
using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

// -- values ---------------------------------------------------------------------------------------

template <typename T>
T value(u64 bits) {
  T x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

template <typename T>
constexpr bool kIsFloat = std::is_floating_point_v<T> || std::is_same_v<T, f16>;

template <typename T>
u64 bits_of(T x) {
  if constexpr (kIsFloat<T>) {
    if (x != x) {
      return sizeof(T) == 2 ? 0x7fffu : sizeof(T) == 4 ? 0x7fffffffu : 0xfff8000000000000u;
    }
  }
  u64 bits = 0;
  std::memcpy(&bits, &x, sizeof x);
  return bits;
}

template <typename T>
const std::string kName = std::string(kIsFloat<T>           ? "f"
                                      : std::is_signed_v<T> ? "s"
                                                            : "u") +
                          std::to_string(8 * sizeof(T));

template <typename T>
const std::string kBitsName = "b" + std::to_string(8 * sizeof(T));

// -- over the lanes of a warp ---------------------------------------------------------------------

template <typename Each>
void for_lanes(Mask mask, const Each& each) {
  if (mask == ~Mask{0}) {
    for (unsigned lane = 0; lane < kLanes; ++lane) each(lane);
  } else {
    for (; mask != 0; mask &= mask - 1) each(static_cast<unsigned>(std::countr_zero(mask)));
  }
}

// D f(S...), into the first operand.
template <auto f, typename D, typename... S>
void apply(Registers& registers, const Instruction& in, Mask mask) {
  [&]<std::size_t... i>(std::index_sequence<i...>) {
    Lanes& d = registers.out(in.operands[0]);
    const Lanes* const s[] = {&registers.in(in.operands[i + 1])...};
    for_lanes(mask, [&](unsigned lane) {
      d[lane] = bits_of<D>(static_cast<D>(f(value<S>((*s[i])[lane])...)));
    });
  }(std::index_sequence_for<S...>{});
}

// bool f(S, S), into a predicate.
template <auto f, typename S>
void compare(Registers& registers, const Instruction& in, Mask mask) {
  const Lanes& a = registers.in(in.operands[1]);
  const Lanes& b = registers.in(in.operands[2]);
  Mask found = 0;
  for_lanes(mask,
            [&](unsigned lane) { found |= Mask{f(value<S>(a[lane]), value<S>(b[lane]))} << lane; });
  Mask& d = registers.predicates[in.operands[0]];
  d = (d & ~mask) | found;
}

// Mask f(Mask...), of predicates.
template <auto f, std::size_t kCount>
void combine(Registers& registers, const Instruction& in, Mask mask) {
  const auto source = [&](std::size_t i) -> Mask {
    const Place place = in.operands[i + 1];
    if (place >= 0) return registers.predicates[place];
    return registers.constants[~place][0] != 0 ? ~Mask{0} : 0;
  };
  Mask& d = registers.predicates[in.operands[0]];
  if constexpr (kCount == 1) {
    d = (d & ~mask) | (f(source(0)) & mask);
  } else {
    d = (d & ~mask) | (f(source(0), source(1)) & mask);
  }
}

template <typename T>
void select(Registers& registers, const Instruction& in, Mask mask) {
  Lanes& d = registers.out(in.operands[0]);
  const Lanes& yes = registers.in(in.operands[1]);
  const Lanes& no = registers.in(in.operands[2]);
  const Mask choice = registers.predicates[in.operands[3]];
  for_lanes(mask,
            [&](unsigned lane) { d[lane] = (choice >> lane & 1) != 0 ? yes[lane] : no[lane]; });
}

// Bits as they are: registers, constants, addresses.
void move(Registers& registers, const Instruction& in, Mask mask) {
  Lanes& d = registers.out(in.operands[0]);
  const Lanes& s = registers.in(in.operands[1]);
  const auto offset = static_cast<u64>(in.offset);
  for_lanes(mask, [&](unsigned lane) { d[lane] = s[lane] + offset; });
}

template <typename T>
void pack(Registers& registers, const Instruction& in, Mask mask) {
  constexpr unsigned kCount = 2;
  Lanes& d = registers.out(in.operands[0]);
  const Lanes* const s[kCount] = {&registers.in(in.operands[1]), &registers.in(in.operands[2])};
  for_lanes(mask, [&](unsigned lane) {
    d[lane] = (*s[0])[lane] | (*s[1])[lane] << (8 * sizeof(T) / kCount);
  });
}

template <typename T>
void unpack(Registers& registers, const Instruction& in, Mask mask) {
  constexpr unsigned kHalf = 4 * sizeof(T);
  Lanes* const d[2] = {&registers.out(in.operands[0]), &registers.out(in.operands[1])};
  const Lanes& s = registers.in(in.operands[2]);
  for_lanes(mask, [&](unsigned lane) {
    const u64 whole = s[lane];
    (*d[0])[lane] = whole & ((u64{1} << kHalf) - 1);
    (*d[1])[lane] = whole >> kHalf;
  });
}

template <typename D, typename S>
void convert(Registers& registers, const Instruction& in, Mask mask) {
  Lanes& d = registers.out(in.operands[0]);
  const Lanes& s = registers.in(in.operands[1]);
  for_lanes(mask, [&](unsigned lane) {
    const D x = static_cast<D>(value<S>(s[lane]));
    d[lane] =
        extended(bits_of<D>(x), sizeof(D), std::is_signed_v<D> && !kIsFloat<D>, in.register_bytes);
  });
}

// Bytes of two registers; the high bit of a selector asks for eight copies of the byte's sign.
u32 permute(u32 a, u32 b, u32 selectors) {
  const u64 bytes = u64{b} << 32 | a;
  u32 result = 0;
  for (unsigned i = 0; i < 4; ++i) {
    const u32 selector = selectors >> (4 * i) & 0xf;
    const auto byte = static_cast<s8>(bytes >> (8 * (selector & 7)));
    const auto chosen = static_cast<u8>((selector & 8) != 0 ? byte >> 7 : byte);
    result |= u32{chosen} << (8 * i);
  }
  return result;
}

template <typename T>
T shifted_right(T x, u32 by) {
  constexpr u32 kMost = 8 * sizeof(T) - 1;
  if (by > kMost) return std::is_signed_v<T> && x < 0 ? T(-1) : T(0);
  return static_cast<T>(x >> by);
}

template <typename T>
void check_division(T a, T b) {
  if (b == 0) fault("a division by zero");
  if constexpr (std::is_signed_v<T>) {
    if (a == std::numeric_limits<T>::min() && b == -1) fault("a division that overflows");
  }
}

// -- the table ------------------------------------------------------------------------------------

class Table {
 public:
  Table();
  const Form* find(std::string_view name);

 private:
  void add(const std::string& name, Form::Run run) { add(Form{name, Form::Kind::kLanes, run}); }
  void add(Form form) {
    const std::string name = form.name;
    forms_.emplace(name, std::make_unique<Form>(std::move(form)));
  }
  template <typename T>
  void add_moves();
  template <typename T>
  void add_compares();
  template <typename T>
  void add_integers();
  template <typename T>
  void add_floats();
  void add_predicates();
  void add_conversions();
  const Form* add_memory(std::string_view name);

  std::unordered_map<std::string, std::unique_ptr<const Form>> forms_;
};

template <typename T>
void Table::add_moves() {
  add("mov." + kName<T>, &move);
  add("selp." + kName<T>, &select<T>);
}

template <typename T>
void Table::add_compares() {
  const auto add_one = [&]<auto f>(const char* name) {
    add(join("", "setp.", name, ".", kName<T>), &compare<f, T>);
  };
  // Of floats, false with a NaN; of those that end in u, true with one.
  add_one.template operator()<[](T a, T b) { return a == b; }>("eq");
  add_one.template operator()<[](T a, T b) { return a < b || b < a; }>("ne");
  add_one.template operator()<[](T a, T b) { return a < b; }>("lt");
  add_one.template operator()<[](T a, T b) { return a <= b; }>("le");
  add_one.template operator()<[](T a, T b) { return b < a; }>("gt");
  add_one.template operator()<[](T a, T b) { return a >= b; }>("ge");
  if constexpr (kIsFloat<T>) {
    add_one.template operator()<[](T a, T b) { return !(a < b || b < a); }>("equ");
    add_one.template operator()<[](T a, T b) { return a != b; }>("neu");
    add_one.template operator()<[](T a, T b) { return !(a >= b); }>("ltu");
    add_one.template operator()<[](T a, T b) { return !(b < a); }>("leu");
    add_one.template operator()<[](T a, T b) { return !(a <= b); }>("gtu");
    add_one.template operator()<[](T a, T b) { return !(a < b); }>("geu");
    add_one.template operator()<[](T a, T b) { return a != a || b != b; }>("nan");
    add_one.template operator()<[](T a, T b) { return a == a && b == b; }>("num");
  }
}

template <typename T>
void Table::add_integers() {
  const std::string type = "." + kName<T>;
  add_moves<T>();
  add_compares<T>();
  add("add" + type, &apply<[](T a, T b) { return u64(a) + u64(b); }, T, T, T>);
  add("sub" + type, &apply<[](T a, T b) { return u64(a) - u64(b); }, T, T, T>);
  add("mul.lo" + type, &apply<[](T a, T b) { return u64(a) * u64(b); }, T, T, T>);
  add("mad.lo" + type, &apply<[](T a, T b, T c) { return u64(a) * u64(b) + u64(c); }, T, T, T, T>);
  if constexpr (sizeof(T) < 8) {
    using Wide =
        std::conditional_t<sizeof(T) == 2, std::conditional_t<std::is_signed_v<T>, s32, u32>,
                           std::conditional_t<std::is_signed_v<T>, s64, u64>>;
    add("mul.wide" + type, &apply<[](T a, T b) { return u64(a) * u64(b); }, Wide, T, T>);
    add("mad.wide" + type,
        &apply<[](T a, T b, Wide c) { return u64(a) * u64(b) + u64(c); }, Wide, T, T, Wide>);
  }
  add("div" + type, &apply<[](T a, T b) { return check_division(a, b), a / b; }, T, T, T>);
  add("rem" + type, &apply<[](T a, T b) { return check_division(a, b), a % b; }, T, T, T>);
  add("min" + type, &apply<[](T a, T b) { return a < b ? a : b; }, T, T, T>);
  add("max" + type, &apply<[](T a, T b) { return b < a ? a : b; }, T, T, T>);
  add("shr" + type, &apply<&shifted_right<T>, T, T, u32>);
  if constexpr (std::is_signed_v<T>) {
    add("neg" + type, &apply<[](T a) { return -u64(a); }, T, T>);
  } else {
    const std::string bits = "." + kBitsName<T>;
    add("mov" + bits, &move);
    add("selp" + bits, &select<T>);
    add("setp.eq" + bits, &compare<[](T a, T b) { return a == b; }, T>);
    add("setp.ne" + bits, &compare<[](T a, T b) { return a != b; }, T>);
    add("and" + bits, &apply<[](T a, T b) { return a & b; }, T, T, T>);
    add("or" + bits, &apply<[](T a, T b) { return a | b; }, T, T, T>);
    add("xor" + bits, &apply<[](T a, T b) { return a ^ b; }, T, T, T>);
    add("not" + bits, &apply<[](T a) { return ~u64(a); }, T, T>);
    add("shl" + bits,
        &apply<[](T a, u32 by) { return by < 8 * sizeof(T) ? u64(a) << by : u64{0}; }, T, T, u32>);
    add("shr" + bits, &apply<&shifted_right<T>, T, T, u32>);
    if constexpr (sizeof(T) > 2) {
      add("mov.pack" + bits, &pack<T>);
      add(Form{"mov.unpack" + bits, Form::Kind::kLanes, &unpack<T>, 2});
    }
  }
}

template <typename T>
void Table::add_floats() {
  const std::string type = "." + kName<T>;
  add_moves<T>();
  add_compares<T>();
  for (const std::string rounding : {"", ".rn"}) {
    add("add" + rounding + type, &apply<[](T a, T b) { return a + b; }, T, T, T>);
    add("sub" + rounding + type, &apply<[](T a, T b) { return a - b; }, T, T, T>);
    add("mul" + rounding + type, &apply<[](T a, T b) { return a * b; }, T, T, T>);
  }
  add("neg" + type, &apply<[](T a) { return -a; }, T, T>);
  add("fma.rn" + type, &apply<[](T a, T b, T c) { return std::fma(a, b, c); }, T, T, T, T>);
  add("div.rn" + type, &apply<[](T a, T b) { return a / b; }, T, T, T>);
  add("rcp.rn" + type, &apply<[](T a) { return T(1) / a; }, T, T>);
}

void Table::add_predicates() {
  add("mov.pred", &combine<[](Mask a) { return a; }, 1>);
  add("not.pred", &combine<[](Mask a) { return ~a; }, 1>);
  add("and.pred", &combine<[](Mask a, Mask b) { return a & b; }, 2>);
  add("or.pred", &combine<[](Mask a, Mask b) { return a | b; }, 2>);
  add("xor.pred", &combine<[](Mask a, Mask b) { return a ^ b; }, 2>);
}

void Table::add_conversions() {
  const auto each = [](auto visit) {
    [&]<typename... T>(std::type_identity<std::tuple<T...>>) {
      (visit.template operator()<T>(), ...);
    }(std::type_identity<std::tuple<s8, u8, s16, u16, s32, u32, s64, u64>>{});
  };
  each([&]<typename D>() {
    each([&]<typename S>() { add("cvt." + kName<D> + "." + kName<S>, &convert<D, S>); });
    add("cvt.rn.f32." + kName<D>, &convert<f32, D>);
    add("cvt.rn.f64." + kName<D>, &convert<f64, D>);
  });
  add("cvt.f32.f16", &convert<f32, f16>);
  add("cvt.rn.f16.f32", &convert<f16, f32>);
  add("cvt.f64.f32", &convert<f64, f32>);
  add("cvt.rn.f32.f64", &convert<f32, f64>);
  // Generic addresses are those of global memory.
  add("cvta.to.global.u64", &move);
}

Table::Table() {
  add_integers<s16>();
  add_integers<u16>();
  add_integers<s32>();
  add_integers<u32>();
  add_integers<s64>();
  add_integers<u64>();
  add_floats<f32>();
  add_floats<f64>();
  add_predicates();
  add_conversions();
  add("prmt.b32", &apply<&permute, u32, u32, u32, u32>);
  using Kind = Form::Kind;
  add(Form{"mov.globaltimer", Kind::kClock});
  for (const char* name : {"bra", "bra.uni"}) add(Form{name, Kind::kBranch, nullptr, 0});
  for (const char* name : {"ret", "exit"}) add(Form{name, Kind::kReturn, nullptr, 0});
  add(Form{"bar.sync", Kind::kBarrier, nullptr, 0});
  add(Form{"bar.red.or.pred", Kind::kBarrierOr});
  add(Form{"nanosleep.u32", Kind::kSleep, nullptr, 0});
}

const Form* Table::find(std::string_view name) {
  const auto found = forms_.find(std::string(name));
  return found != forms_.end() ? found->second.get() : add_memory(name);
}

// -- memory ---------------------------------------------------------------------------------------

template <typename T, std::size_t kSize>
bool take(std::string_view word, const std::pair<const char*, T> (&names)[kSize], T& to) {
  for (const auto& [name, found] : names) {
    if (word != name) continue;
    to = found;
    return true;
  }
  return false;
}

constexpr std::pair<const char*, Space> kSpaces[] = {
    {"global", Space::kGlobal},
    {"shared", Space::kShared},
    {"local", Space::kLocal},
    {"param", Space::kParameters},
};
constexpr std::pair<const char*, Strength> kStrengths[] = {
    {"weak", Strength::kWeak},
    {"relaxed", Strength::kRelaxed},
    {"acquire", Strength::kAcquire},
    {"release", Strength::kRelease},
    {"acq_rel", Strength::kAcquireRelease},
};
constexpr std::pair<const char*, Scope> kScopes[] = {
    {"cta", Scope::kBlock}, {"gpu", Scope::kDevice}, {"sys", Scope::kSystem}};
constexpr std::pair<const char*, Form::Kind> kKinds[] = {
    {"ld", Form::Kind::kLoad},
    {"st", Form::Kind::kStore},
    {"atom", Form::Kind::kSwap},
    {"fence", Form::Kind::kFence},
};
// Where a cache may keep it: says nothing of order (PTX ISA 9.7.9.1).
constexpr std::pair<const char*, bool> kHints[] = {
    {"ca", true}, {"cg", true}, {"cs", true}, {"wb", true}};
constexpr std::pair<const char*, unsigned> kCounts[] = {{"v2", 2}, {"v4", 4}};
constexpr std::pair<const char*, unsigned> kBytes[] = {{"8", 1}, {"16", 2}, {"32", 4}, {"64", 8}};

// What an access is, word for word; null where a word is not known.
const Form* Table::add_memory(std::string_view name) {
  Form form;
  form.name = name;
  bool is_hint = false;
  bool is_swap = false;
  bool has_operation = false;
  for (std::size_t begin = 0; begin <= name.size();) {
    const std::size_t end = std::min(name.find('.', begin), name.size());
    const std::string_view word = name.substr(begin, end - begin);
    if (begin == 0) {
      if (!take(word, kKinds, form.kind)) return nullptr;
      is_swap = form.kind == Form::Kind::kSwap;
      if (is_swap) form.strength = Strength::kRelaxed;
    } else if (is_swap && (word == "cas" || word == "add")) {
      has_operation = true;
      if (word == "add") form.kind = Form::Kind::kAdd;
    } else if (word.size() > 1 &&
               (std::string_view("bsuf").find(word[0]) != std::string_view::npos) &&
               take(word.substr(1), kBytes, form.bytes)) {
      form.is_signed = word[0] == 's';
    } else if (!take(word, kSpaces, form.space) && !take(word, kStrengths, form.strength) &&
               !take(word, kScopes, form.scope) && !take(word, kHints, is_hint) &&
               !take(word, kCounts, form.count)) {
      return nullptr;
    }
    begin = end + 1;
  }
  const bool is_fence = form.kind == Form::Kind::kFence;
  if (is_swap != has_operation || (form.bytes == 0) != is_fence) return nullptr;
  // Words are what has a history.
  const bool is_word = form.bytes == 4 && form.count == 1 &&
                       (form.space == Space::kGlobal || form.space == Space::kGeneric);
  if (form.is_strong() && !is_fence && !is_word) return nullptr;
  form.num_destinations = form.kind == Form::Kind::kStore || is_fence ? 0 : form.count;
  add(std::move(form));
  return forms_.at(std::string(name)).get();
}

}  // namespace

std::uint64_t extended(std::uint64_t bits, unsigned bytes, bool is_signed,
                       unsigned register_bytes) {
  const unsigned unused = 64 - 8 * bytes;
  if (is_signed) bits = static_cast<u64>(static_cast<s64>(bits << unused) >> unused);
  return register_bytes == 8 ? bits : bits & ((u64{1} << (8 * register_bytes)) - 1);
}

const Form* find_form(std::string_view name) {
  static Table table;
  return table.find(name);
}

}  // namespace pyringar::ptx
