#include "support/cases.h"

#include <cstdlib>
#include <fstream>
#include <span>
#include <sstream>
#include <stdexcept>

namespace flash_dmattn::testing {
namespace {

std::vector<std::string> split(const std::string& line) {
  std::vector<std::string> words;
  std::stringstream stream(line);
  for (std::string word; std::getline(stream, word, ',');) {  // drops an empty last word
    const auto begin = word.find_first_not_of(" \r");
    const auto end = word.find_last_not_of(" \r");
    words.push_back(begin == std::string::npos ? "" : word.substr(begin, end - begin + 1));
  }
  return words;
}

template <class Value>
Value one_of(const std::string& word, const std::map<std::string, Value>& values) {
  const auto found = values.find(word);
  if (found == values.end()) throw std::runtime_error("unknown word '" + word + "'");
  return found->second;
}

DType dtype_of(const std::string& word) {
  return one_of<DType>(
      word, {{"f32", DType::f32}, {"bf16", DType::bf16}, {"f16", DType::f16}, {"f64", DType::f64}});
}

// Maps "b1qk" to {B, 1, Sq, Sk}; h is Hq, v is Hkv.
BroadcastShape shape_of(const std::string& word, const Problem& p) {
  if (word == "none") return {};
  BroadcastShape shape{};
  const std::map<char, std::int64_t> sizes{{'1', 1},          {'b', p.batch},    {'h', p.heads_q},
                                           {'v', p.heads_kv}, {'q', p.seqlen_q}, {'k', p.seqlen_k}};
  if (word.size() != 4) throw std::runtime_error("not a shape: '" + word + "'");
  for (std::size_t dim = 0; dim < 4; ++dim) shape[dim] = sizes.at(word[dim]);
  return shape;
}

Case parse(const CaseWords& words) {
  const auto word = [&](const char* column) { return words.at(column); };
  const auto integer = [&](const char* column) { return std::stoll(words.at(column)); };
  Case c;
  c.name = word("name");
  Problem& p = c.problem;
  p.batch = integer("batch");
  p.heads_q = integer("heads_q");
  p.heads_kv = integer("heads_kv");
  p.seqlen_q = integer("seqlen_q");
  p.seqlen_k = integer("seqlen_k");
  p.head_dim = integer("head_dim");
  p.value_dim = integer("value_dim");
  p.dtype = dtype_of(word("dtype"));
  p.scale = word("scale") == "default" ? default_scale(p.head_dim) : std::stod(word("scale"));
  p.softcap = std::stod(word("softcap"));
  p.causal = integer("causal") != 0;
  p.nonfinite = one_of<NonFinite>(
      word("nonfinite"), {{"saturate", NonFinite::saturate}, {"propagate", NonFinite::propagate}});
  p.mask_shape = shape_of(word("mask"), p);
  p.bias_shape = shape_of(word("bias"), p);
  p.bias_dtype = word("bias_dtype") == "same" ? p.dtype : dtype_of(word("bias_dtype"));
  p.bias_delay = integer("bias_delay");
  c.mask_fill = word("mask_fill");
  c.bias_fill = word("bias_fill");
  c.intervals = word("intervals");
  if (c.intervals != "none") {
    const auto shape = shape_of(word("intervals_shape") + "11", p);
    p.intervals_shape = {shape[0], shape[1]};
  }
  c.window = integer("window");
  c.rule = word("rule");
  c.inputs = word("inputs");
  c.layout = one_of<Layout>(word("layout"), {{"contiguous", Layout::contiguous},
                                             {"permuted", Layout::permuted},
                                             {"padded", Layout::padded},
                                             {"gaps", Layout::gaps},
                                             {"reversed", Layout::reversed},
                                             {"expanded", Layout::expanded}});
  c.has_dlse = one_of<bool>(word("dlse"), {{"none", false}, {"normal", true}});
  c.seed = static_cast<std::uint64_t>(integer("seed"));
  c.slow = integer("slow") != 0;
  c.only_on_gpus = integer("slow") == 2;
  return c;
}

// Reads the rows of the table, the defaults first.
std::vector<CaseWords> read_table() {
  const char* moved = std::getenv("FLASH_DMATTN_CASES_DIR");  // tests that run on another machine
  const std::string folder = moved == nullptr ? FLASH_DMATTN_CASES_DIR : moved;
  const std::string path = folder + "/attention.csv";
  std::ifstream file(path);
  if (!file) throw std::runtime_error("cannot read " + path);
  std::vector<std::string> columns;
  std::vector<CaseWords> rows;
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    if (line.empty() || line[0] == '#') continue;
    const auto words = split(line);
    if (columns.empty()) {
      columns = words;
      continue;
    }
    // A row may leave out bias_delay and value_dim.
    if (words.size() + 3 < columns.size() || words.size() > columns.size()) {
      throw std::runtime_error(path + ":" + std::to_string(number) + ": " +
                               std::to_string(words.size()) + " words for " +
                               std::to_string(columns.size()) + " columns");
    }
    CaseWords row = rows.empty() ? CaseWords() : rows.front();
    for (std::size_t i = 0; i < words.size(); ++i) {
      if (!words[i].empty()) row[columns[i]] = words[i];
    }
    rows.push_back(row);
  }
  return rows;
}

const std::vector<CaseWords>& table() {
  static const std::vector<CaseWords> rows = read_table();
  return rows;
}

}  // namespace

CaseWords::CaseWords(const char* text, std::initializer_list<value_type> others)
    : CaseWords(others) {
  std::stringstream stream(text);
  for (std::string word; stream >> word;) {
    const auto equals = word.find('=');
    if (equals == std::string::npos) throw std::runtime_error("no column in '" + word + "'");
    (*this)[word.substr(0, equals)] = word.substr(equals + 1);
  }
}

Case case_from(const CaseWords& words) {
  CaseWords whole = table().front();
  for (const auto& [column, word] : words) {
    if (!whole.contains(column)) throw std::runtime_error("no column '" + column + "'");
    whole[column] = word;
  }
  return parse(whole);
}

bool is_quick_run() { return std::getenv("FLASH_DMATTN_QUICK_TESTS") != nullptr; }

const std::vector<Case>& attention_cases() {
  static const std::vector<Case> cases = [] {
    std::vector<Case> parsed;
    for (const CaseWords& words : std::span(table()).subspan(1)) {
      try {
        parsed.push_back(parse(words));
      } catch (const std::exception& error) {
        throw std::runtime_error("case " + words.at("name") + ": " + error.what());
      }
    }
    return parsed;
  }();
  return cases;
}

const Case& attention_case(const std::string& name) {
  for (const Case& c : attention_cases()) {
    if (c.name == name) return c;
  }
  throw std::runtime_error("no case " + name);
}

std::ostream& operator<<(std::ostream& stream, const Case& c) { return stream << c.name; }

}  // namespace flash_dmattn::testing
