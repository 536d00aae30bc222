// program: see the header.

#include "program.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <deque>
#include <optional>
#include <utility>

#include "fault.h"
#include "forms.h"
#include "registers.h"

namespace pyringar::ptx {

namespace {

using Map = std::map<std::string, std::size_t, std::less<>>;
using Sources = std::map<std::size_t, std::string>;

// Of all instructions that were ever read: reports are about several kernels.
std::deque<std::string> place_names;

bool is_space(char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; }

std::string_view stripped(std::string_view text) {
  while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
  return text;
}

std::vector<std::string_view> words_of(std::string_view text) {
  std::vector<std::string_view> words;
  for (text = stripped(text); !text.empty(); text = stripped(text)) {
    const auto end = std::find_if(text.begin(), text.end(), is_space);
    words.push_back(text.substr(0, static_cast<std::size_t>(end - text.begin())));
    text.remove_prefix(words.back().size());
  }
  return words;
}

// What lies between commas, those inside of braces and brackets not counted.
std::vector<std::string_view> split(std::string_view text) {
  std::vector<std::string_view> parts;
  int depth = 0;
  std::size_t begin = 0;
  for (std::size_t i = 0; i <= text.size(); ++i) {
    const char c = i < text.size() ? text[i] : ',';
    depth += (c == '{' || c == '[') - (c == '}' || c == ']');
    if (c != ',' || depth != 0) continue;
    parts.push_back(stripped(text.substr(begin, i - begin)));
    begin = i + 1;
  }
  if (parts.size() == 1 && parts[0].empty()) parts.clear();
  return parts;
}

std::optional<std::int64_t> integer(std::string_view text) {
  const bool is_negative = text.starts_with('-');
  if (is_negative) text.remove_prefix(1);
  const int base = text.starts_with("0x") ? 16 : 10;
  if (base == 16) text.remove_prefix(2);
  if (text.ends_with('U')) text.remove_suffix(1);
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, base);
  if (text.empty() || error != std::errc() || end != text.data() + text.size()) return {};
  return static_cast<std::int64_t>(is_negative ? ~value + 1 : value);
}

// Bytes of a type such as .b64; 0: a predicate.
unsigned type_bytes(std::string_view type) {
  if (type == ".pred") return 0;
  unsigned bits = 0;
  std::from_chars(type.data() + 2, type.data() + type.size(), bits);
  if (type.size() < 3 || bits % 8 != 0 || bits == 0 || bits > 64) fault("unknown type ", type);
  return bits / 8;
}

// A declared variable: ".align 8 .b8 name[232]" or ".u64 name".
struct Variable {
  explicit Variable(std::string_view text) {
    for (const std::string_view word : words_of(text)) {
      if (is_align_next) {
        align = static_cast<std::size_t>(integer(word).value_or(1));
        is_align_next = false;
      } else if (word == ".align") {
        is_align_next = true;
      } else if (word.starts_with('.')) {
        if (word == ".param" || word == ".shared" || word == ".local") continue;
        bytes = type_bytes(word);
        align = std::max(align, bytes);
      } else {
        const std::size_t bracket = word.find('[');
        name = word.substr(0, bracket);
        if (bracket == std::string_view::npos) continue;
        const auto count = integer(word.substr(bracket + 1, word.size() - bracket - 2));
        if (!count) fault("no size of ", word);
        bytes *= static_cast<std::size_t>(*count);
      }
    }
    if (name.empty() || bytes == 0) fault("cannot read the variable ", text);
  }

  std::size_t place_behind(std::size_t& end) const {
    const std::size_t begin = (end + align - 1) / align * align;
    end = begin + bytes;
    return begin;
  }

  std::string name;
  std::size_t bytes = 0;
  std::size_t align = 1;
  bool is_align_next = false;
};

// Text as statements, without comments, with its line.
class Reader {
 public:
  Reader(std::string_view text, std::size_t begin, std::uint32_t line)
      : text_(text), at_(begin), line_(line) {}

  std::uint32_t line() const { return line_; }

  // "{", "}", "name:", a line with .loc, or what ends with a semicolon, without it.
  std::string next_statement() {
    std::string statement;
    skip_space();
    const std::string_view rest = text_.substr(at_);
    if (rest.starts_with(".loc ") || rest.starts_with(".loc\t")) return up_to('\n');
    for (; at_ < text_.size(); skip_comments()) {
      const char c = text_[at_++];
      if (c == '\n') ++line_;
      if (c == ';') return statement;
      statement += c == '\n' || c == '\t' ? ' ' : c;
      const bool is_first = statement.size() == 1;
      if (is_first && (c == '{' || c == '}')) return statement;
      const bool is_label = c == ':' && statement.find(' ') == std::string::npos;
      if (is_label && !text_.substr(at_).starts_with(':')) return statement;
    }
    fault("the text ends within a kernel");
  }

  std::string up_to(char end) {
    std::string found;
    for (skip_comments(); at_ < text_.size() && text_[at_] != end; skip_comments()) {
      if (text_[at_] == '\n') ++line_;
      found += text_[at_++];
    }
    ++at_;
    return found;
  }

 private:
  void skip_comments() {
    while (text_.substr(at_).starts_with("//")) at_ = std::min(text_.find('\n', at_), text_.size());
  }
  void skip_space() {
    for (skip_comments(); at_ < text_.size() && is_space(text_[at_]); skip_comments()) {
      if (text_[at_++] == '\n') ++line_;
    }
  }

  const std::string_view text_;
  std::size_t at_;
  std::uint32_t line_;
};

class KernelReader {
 public:
  KernelReader(Reader reader, const Sources& sources, const Map& shared, std::size_t shared_bytes)
      : reader_(reader), sources_(sources), shared_(shared) {
    kernel_.shared_bytes = shared_bytes;
  }

  Kernel read();

 private:
  struct Register {
    Place place;
    unsigned bytes;  // 0: a predicate
  };
  using Names = std::map<std::string, Register, std::less<>>;
  struct Parsed {
    Place place = kNoPlace;
    unsigned bytes = 8;
    std::int64_t offset = 0;
    std::string_view label = {};
  };

  void read_header();
  void read_directive(const std::string& statement);
  void read_instruction(std::string_view statement);
  void add_registers(std::string_view type, std::string_view names);
  const Register* find(std::string_view name) const;
  void add_operand(Instruction& in, std::string_view text, unsigned immediate_bytes);
  Parsed parse(std::string_view text, unsigned immediate_bytes);
  Place constant(std::uint64_t bits);

  Reader reader_;
  const Sources& sources_;
  const Map& shared_;
  Map parameters_;
  Map locals_;
  Kernel kernel_;
  std::vector<Names> scopes_{1};
  Map labels_;
  std::vector<std::pair<std::size_t, std::string>> branches_;  // by instruction
  std::map<std::uint64_t, Place> constants_;
  std::string source_;  // of what follows
};

Kernel KernelReader::read() {
  read_header();
  for (int depth = 1; depth > 0;) {
    const std::string statement = reader_.next_statement();
    if (statement == "{") {
      scopes_.emplace_back();
      ++depth;
    } else if (statement == "}") {
      scopes_.pop_back();
      --depth;
    } else if (statement.ends_with(':')) {
      labels_.emplace(statement.substr(0, statement.size() - 1), kernel_.code.size());
    } else if (statement.starts_with('.')) {
      read_directive(statement);
    } else {
      read_instruction(statement);
    }
  }
  for (const auto& [at, label] : branches_) {
    const auto found = labels_.find(label);
    if (found == labels_.end()) fault(place_name(kernel_.code[at].place), ": no label ", label);
    kernel_.code[at].target = static_cast<std::uint32_t>(found->second);
  }
  share_registers(kernel_);
  return std::move(kernel_);
}

void KernelReader::read_header() {
  reader_.up_to('(');  // its name
  const std::string parameters = reader_.up_to(')');
  for (const std::string_view text : split(parameters)) {
    const Variable variable(text);
    parameters_[variable.name] = variable.place_behind(kernel_.parameter_bytes);
    kernel_.parameter_align = std::max(kernel_.parameter_align, variable.align);
  }
  const std::string limits = reader_.up_to('{');
  const auto words = words_of(limits);
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (words[i] == ".maxntid" && i + 1 < words.size()) {
      const std::string_view count = words[i + 1];
      kernel_.max_threads =
          static_cast<unsigned>(integer(count.substr(0, count.find(','))).value());
    } else if (words[i].starts_with('.') && words[i] != ".minnctapersm") {
      fault("line ", reader_.line(), ": unknown directive ", words[i]);
    }
  }
}

void KernelReader::read_directive(const std::string& statement) {
  const auto words = words_of(statement);
  if (words[0] == ".pragma") return;
  if (words[0] == ".loc" && words.size() > 2) {
    const auto found = sources_.find(static_cast<std::size_t>(integer(words[1]).value_or(0)));
    source_ = found == sources_.end() ? "" : join("", found->second, ":", words[2], " (");
    return;
  }
  if (words[0] == ".reg" && words.size() > 2) {
    const std::string_view type = words[1];
    const auto begin = static_cast<std::size_t>(type.data() + type.size() - statement.data());
    return add_registers(type, std::string_view(statement).substr(begin));
  }
  if (words[0] == ".local") {
    const Variable variable(statement);
    locals_[variable.name] = variable.place_behind(kernel_.local_bytes);
    return;
  }
  fault("line ", reader_.line(), ": unknown directive ", words[0]);
}

void KernelReader::add_registers(std::string_view type, std::string_view names) {
  const unsigned bytes = type_bytes(type);
  std::uint32_t& count = bytes == 0 ? kernel_.num_predicates : kernel_.num_registers;
  for (std::string_view name : split(names)) {
    const std::size_t angle = name.find('<');
    if (angle == std::string_view::npos) {
      scopes_.back()[std::string(name)] = {static_cast<Place>(count++), bytes};
      continue;
    }
    const auto n = integer(name.substr(angle + 1, name.size() - angle - 2));
    if (!n) fault("line ", reader_.line(), ": cannot read the registers ", name);
    for (std::int64_t i = 0; i < *n; ++i) {
      const std::string numbered = std::string(name.substr(0, angle)) + std::to_string(i);
      scopes_.back()[numbered] = {static_cast<Place>(count++), bytes};
    }
  }
}

const KernelReader::Register* KernelReader::find(std::string_view name) const {
  for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
    const auto found = scope->find(name);
    if (found != scope->end()) return &found->second;
  }
  static const Names kGiven = [] {
    const auto given = [](Given which, unsigned bytes) {
      return Register{static_cast<Place>(which), bytes};
    };
    return Names{{"%tid.x", given(Given::kThread, 4)},
                 {"%ntid.x", given(Given::kNumThreads, 4)},
                 {"%ctaid.x", given(Given::kBlock, 4)},
                 {"%nctaid.x", given(Given::kNumBlocks, 4)},
                 {"_", given(Given::kSink, 8)}};
  }();
  const auto found = kGiven.find(name);
  return found != kGiven.end() ? &found->second : nullptr;
}

Place KernelReader::constant(std::uint64_t bits) {
  const auto [found, is_new] =
      constants_.try_emplace(bits, ~static_cast<Place>(kernel_.constants.size()));
  if (is_new) kernel_.constants.emplace_back().fill(bits);
  return found->second;
}

// A register, a number, an address such as register + 8, a name that stands for one, or a label.
KernelReader::Parsed KernelReader::parse(std::string_view text, unsigned immediate_bytes) {
  if (const Register* found = find(text)) return {found->place, found->bytes};
  if (text.starts_with("0f") || text.starts_with("0d")) {
    const auto bits = integer(join("", "0x", text.substr(2)));
    if (bits) return {constant(static_cast<std::uint64_t>(*bits))};
  }
  if (const auto number = integer(text)) {
    return {constant(extended(static_cast<std::uint64_t>(*number), 8, false, immediate_bytes))};
  }
  const std::size_t plus = text.rfind('+');
  if (plus != std::string_view::npos) {
    const auto offset = integer(text.substr(plus + 1));
    Parsed base = parse(text.substr(0, plus), 8);
    if (!offset || base.place == kNoPlace) fault("line ", reader_.line(), ": no address: ", text);
    base.offset += *offset;
    return base;
  }
  for (const auto& [names, given] :
       {std::pair(&std::as_const(parameters_), Given::kParameters),
        std::pair(&shared_, Given::kShared), std::pair(&std::as_const(locals_), Given::kLocal)}) {
    const auto found = names->find(text);
    if (found == names->end()) continue;
    return {static_cast<Place>(given), 8, static_cast<std::int64_t>(found->second)};
  }
  return {kNoPlace, 8, 0, text};
}

void KernelReader::add_operand(Instruction& in, std::string_view text, unsigned immediate_bytes) {
  if (text.starts_with('{') || text.starts_with('[')) {
    for (const std::string_view part : split(text.substr(1, text.size() - 2))) {
      add_operand(in, part, immediate_bytes);
    }
    return;
  }
  const Parsed parsed = parse(text, immediate_bytes);
  if (!parsed.label.empty()) {
    if (in.form->kind != Form::Kind::kBranch) {
      fault(place_name(in.place), ": unknown operand ", text, " of ", in.form->name);
    }
    branches_.emplace_back(kernel_.code.size(), parsed.label);
    return;
  }
  if (in.num_operands == in.operands.size()) fault(place_name(in.place), ": too many operands");
  if (in.num_operands == 0) in.register_bytes = static_cast<std::uint8_t>(parsed.bytes);
  if (parsed.bytes == 0) in.predicates |= static_cast<std::uint8_t>(1u << in.num_operands);
  in.operands[in.num_operands++] = parsed.place;
  in.offset += parsed.offset;
}

void KernelReader::read_instruction(std::string_view statement) {
  Instruction in{};
  in.place = static_cast<std::uint32_t>(place_names.size());
  place_names.push_back(join("", source_, "line ", reader_.line(), source_.empty() ? "" : ")"));
  statement = stripped(statement);
  if (statement.starts_with('@')) {
    const std::string_view guard = words_of(statement)[0];
    statement = stripped(statement.substr(guard.size()));
    in.guard_is_negated = guard[1] == '!';
    const Register* found = find(guard.substr(in.guard_is_negated ? 2 : 1));
    if (found == nullptr) fault(place_name(in.place), ": unknown guard ", guard);
    in.guard = found->place;
  }
  std::string name(words_of(statement)[0]);
  const std::string_view rest = stripped(statement.substr(name.size()));
  const auto operands = split(rest);
  // One name for what are several instructions.
  if (name.starts_with("mov.") && operands.size() == 2) {
    if (operands[1] == "%globaltimer") name = "mov.globaltimer";
    if (operands[0].starts_with('{')) name.insert(3, ".unpack");
    if (operands[1].starts_with('{')) name.insert(3, ".pack");
  }
  in.form = find_form(name);
  if (in.form == nullptr) fault(place_name(in.place), ": unknown instruction ", name);
  const std::string_view type = std::string_view(name).substr(name.rfind('.') + 1);
  unsigned bits = 64;
  std::from_chars(type.data() + 1, type.data() + type.size(), bits);
  for (const std::string_view operand : operands) {
    if (operand != "%globaltimer") add_operand(in, operand, bits / 8);
  }
  kernel_.code.push_back(in);
}

}  // namespace

std::string place_name(std::uint32_t place) { return place_names.at(place); }

Module::Module(std::string file, std::string text)
    : file_(std::move(file)), text_(std::move(text)) {
  std::uint32_t line = 1;
  for (std::size_t at = 0; at < text_.size(); ++line) {
    const std::size_t end = std::min(text_.find('\n', at), text_.size());
    const std::string_view whole = std::string_view(text_).substr(at, end - at);
    constexpr std::string_view kEntry = ".entry ";
    if (whole.starts_with(".shared")) {
      const Variable variable(whole.substr(0, whole.find(';')));
      shared_[variable.name] = variable.place_behind(shared_bytes_);
    } else if (const std::size_t entry = whole.find(kEntry); entry != std::string_view::npos) {
      const std::size_t name = at + entry + kEntry.size();
      kernels_.emplace(text_.substr(name, text_.find('(', name) - name),
                       Source{name, line, nullptr});
    } else if (const auto words = words_of(whole); !words.empty() && words[0] == ".file") {
      const std::string_view path = words.at(2).substr(1, words[2].size() - 2);
      sources_[static_cast<std::size_t>(integer(words[1]).value_or(0))] =
          path.substr(path.rfind('/') + 1);
    } else if (whole.find(".func ") != std::string_view::npos) {
      fault(file_, ": line ", line, ": functions are not known here");
    }
    at = end + 1;
  }
}

std::vector<std::string> Module::names() const {
  std::vector<std::string> names;
  for (const auto& [name, source] : kernels_) names.push_back(name);
  return names;
}

const Kernel& Module::kernel(const std::string& name) {
  const auto found = kernels_.find(name);
  if (found == kernels_.end()) fault(file_, ": no kernel ", name);
  Source& source = found->second;
  if (source.kernel == nullptr) {
    try {
      KernelReader reader(Reader(text_, source.begin, source.line), sources_, shared_,
                          shared_bytes_);
      source.kernel = std::make_unique<const Kernel>(reader.read());
    } catch (const Fault& error) {
      fault(file_, ": ", error.what());
    }
  }
  return *source.kernel;
}

}  // namespace pyringar::ptx
