// Drafts from a text itself (what followed when its last tokens occurred before), and what becomes
// of drafts in the row table, as in quire/kernels/torch/rows.py.

#include <algorithm>
#include <cstdint>

namespace {

struct Place {
  int64_t at;
  int64_t length;  // tokens before it that agree
};

// Of the places whose tokens before them agree with the last ones of the text in at least `least`
// tokens: the one that agrees in most, up to `most`; of several the latest. `count` if there is
// none.
Place best_place(const int32_t* tokens, int64_t count, int64_t least, int64_t most) {
  int64_t best = count, length = least - 1;
  const int32_t last = count ? tokens[count - 1] : 0;
  for (int64_t place = count - 1; place >= least && length < most; --place) {
    if (tokens[place - 1] != last) continue;
    const int64_t limit = most < place ? most : place;
    int64_t common = 1;
    while (common < limit && tokens[place - 1 - common] == tokens[count - 1 - common]) ++common;
    if (common > length) {
      best = place;
      length = common;
    }
  }
  return {best, length};
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Writes `num_drafts` drafts of each row, which go on with themselves at the end of the text, or -1
// where nothing agrees and for those that are more than `beyond` beyond the tokens that agree;
// returns whether any row has drafts.
int32_t quire_propose_ngrams(const int32_t* tokens, int64_t stride, const int32_t* num_tokens,
                             const int32_t* rows, int64_t num_rows, int64_t least, int64_t most,
                             int64_t num_drafts, int64_t beyond, int32_t* drafts) {
  int32_t any = 0;
  for (int64_t i = 0; i < num_rows; ++i) {
    const int32_t* row = tokens + rows[i] * stride;
    const int64_t count = num_tokens[rows[i]];
    const Place place = best_place(row, count, least, most);
    const int64_t used = place.at < count ? place.length + beyond : 0;
    for (int64_t j = 0, from = place.at; j < num_drafts; ++j) {
      drafts[i * num_drafts + j] = j < used ? row[from] : -1;
      if (++from == count) from = place.at;
    }
    any |= used > 0;
  }
  return any;
}

// Row r of the table has `tokens[r * stride]` and following, at most `length`; `num_tokens[r]` of
// them are known, and `waiting[r]` drafts lie behind those.
struct QuireDraftedRows {
  int32_t* tokens;
  int64_t stride;
  int64_t length;
  int32_t* num_tokens;
  int32_t* num_computed;
  int32_t* waiting;
  const int32_t* appends;
};

void quire_write_drafts(const QuireDraftedRows* table, const int32_t* rows, int64_t num_rows,
                        const int32_t* drafts, int64_t num_drafts, int32_t* counts) {
  for (int64_t i = 0; i < num_rows; ++i, drafts += num_drafts) {
    const int64_t row = rows[i], known = table->num_tokens[row];
    const int64_t most = std::min(num_drafts, table->length - known);
    int32_t* behind = table->tokens + row * table->stride + known;
    int32_t count = 0;
    for (; count < most && drafts[count] >= 0; ++count) behind[count] = drafts[count];
    table->waiting[row] = counts[i] = count;
  }
}

void quire_accept_tokens(const QuireDraftedRows* table, const int32_t* rows, int64_t num_rows,
                         const int32_t* first_lines, const int32_t* num_lines,
                         const int32_t* sampled, int32_t* counts) {
  for (int64_t i = 0; i < num_rows; ++i) {
    const int64_t row = rows[i], known = table->num_tokens[row];
    const int32_t* of_row = sampled + first_lines[i];
    int32_t* behind = table->tokens + row * table->stride + known;
    const int32_t verified = std::min(num_lines[i] - 1, table->waiting[row]);
    int32_t count = 1;
    while (count <= verified && behind[count - 1] == of_row[count - 1]) ++count;
    if (table->appends[row]) {
      std::copy(of_row, of_row + count, behind);
      table->num_tokens[row] += count;
      table->num_computed[row] = table->num_tokens[row] - 1;
    }
    table->waiting[row] = 0;
    counts[i] = count;
  }
}

}  // extern "C"
#pragma GCC visibility pop
