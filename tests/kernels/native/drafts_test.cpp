// Drafts: found in the text, written behind it, and accepted while they agree.

#include <algorithm>

#include "check.h"

extern "C" {
struct QuireDraftedRows {
  int32_t* tokens;
  int64_t stride;
  int64_t length;
  int32_t* num_tokens;
  int32_t* num_computed;
  int32_t* waiting;
  const int32_t* appends;
};

int32_t quire_propose_ngrams(const int32_t* tokens, int64_t stride, const int32_t* num_tokens,
                             const int32_t* rows, int64_t num_rows, int64_t least, int64_t most,
                             int64_t num_drafts, int64_t beyond, int32_t* drafts);
void quire_write_drafts(const QuireDraftedRows* table, const int32_t* rows, int64_t num_rows,
                        const int32_t* drafts, int64_t num_drafts, int32_t* counts);
void quire_accept_tokens(const QuireDraftedRows* table, const int32_t* rows, int64_t num_rows,
                         const int32_t* first_lines, const int32_t* num_lines,
                         const int32_t* sampled, int32_t* counts);
}

namespace check {
namespace {

using Tokens = std::vector<int32_t>;

// What follows the place that agrees with the end of the text in most tokens, found the long way.
Tokens expected_drafts(const Tokens& text, int64_t least, int64_t most, int64_t num_drafts,
                       int64_t beyond) {
  const int64_t count = static_cast<int64_t>(text.size());
  for (int64_t length = most; length >= least; --length) {
    for (int64_t place = count - 1; place >= length; --place) {
      if (!std::equal(text.end() - length, text.end(), text.begin() + place - length)) continue;
      Tokens drafts;
      for (int64_t from = place; static_cast<int64_t>(drafts.size()) < num_drafts;) {
        drafts.push_back(text[from]);
        if (++from == count) from = place;
      }
      for (int64_t i = length + beyond; i < num_drafts; ++i) drafts[i] = -1;
      return drafts;
    }
  }
  return Tokens(num_drafts, -1);
}

}  // namespace

void test_propose_ngrams() {
  Random random(11);
  for (int round = 0; round < 40; ++round) {
    const int64_t least = random.integer(1, 3), most = least + random.integer(0, 3);
    const int64_t num_drafts = random.integer(1, 6), beyond = random.integer(0, 6);
    const int64_t count = random.integer(1, 40);
    Tokens text(count);
    for (int32_t& token : text) token = random.integer(0, 3);
    // The second of two rows, so that one is read at its place and no further.
    Tokens table(count, 9);
    table.insert(table.end(), text.begin(), text.end());
    const Tokens num_tokens{0, static_cast<int32_t>(count)}, rows{1};
    Tokens drafts(num_drafts);
    const int32_t any = quire_propose_ngrams(table.data(), count, num_tokens.data(), rows.data(), 1,
                                             least, most, num_drafts, beyond, drafts.data());
    const Tokens expected = expected_drafts(text, least, most, num_drafts, beyond);
    equal("any", any, expected[0] >= 0);
    for (int64_t i = 0; i < num_drafts; ++i) equal("draft", drafts[i], expected[i]);
  }
}

void test_accept_tokens() {
  // Three rows of 6 tokens: room for all drafts, for one, and one that does not take its own.
  Tokens tokens{1, 2, 0, 0, 0, 0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 0, 0, 0};
  Tokens num_tokens{2, 5, 3}, num_computed{1, 4, 2}, waiting{0, 0, 0};
  const Tokens appends{1, 1, 0}, rows{0, 1, 2};
  const QuireDraftedRows table{tokens.data(),       6,
                               6,                   num_tokens.data(),
                               num_computed.data(), waiting.data(),
                               appends.data()};
  const Tokens drafts{7, 8, 9, 7, 8, 9, 7, -1, -1};
  Tokens counts(3);
  quire_write_drafts(&table, rows.data(), 3, drafts.data(), 3, counts.data());
  const Tokens written{3, 1, 1};
  for (size_t i = 0; i < 3; ++i) {
    equal("written", counts[i], written[i]);
    equal("waiting", waiting[i], written[i]);
  }
  // The first row agrees in two drafts of three; the second has as many lines, but one draft.
  const Tokens first_lines{0, 4, 5}, num_lines{4, 1, 2}, sampled{7, 8, 5, 6, 4, 7, 3};
  quire_accept_tokens(&table, rows.data(), 3, first_lines.data(), num_lines.data(), sampled.data(),
                      counts.data());
  const Tokens accepted{3, 1, 2}, known{5, 6, 3}, computed{4, 5, 2};
  for (size_t i = 0; i < 3; ++i) {
    equal("accepted", counts[i], accepted[i]);
    equal("known", num_tokens[i], known[i]);
    equal("computed", num_computed[i], computed[i]);
    equal("waiting after", waiting[i], 0);
  }
  const Tokens texts{1, 2, 7, 8, 5, 0, 1, 2, 3, 4, 5, 4, 1, 2, 3, 7, 0, 0};
  // A rejected draft may still lie behind the known tokens; only these count.
  for (size_t row = 0; row < 3; ++row)
    for (int32_t i = 0; i < known[row]; ++i)
      equal("token", tokens[row * 6 + i], texts[row * 6 + i]);
}

}  // namespace check
