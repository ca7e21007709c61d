// Drafts from a text itself: what followed when its last tokens occurred before.

#include <cstdint>

namespace {

// Of the places whose tokens before them agree with the last ones of the text in at least `least`
// tokens: the one that agrees in most, up to `most`; of several the latest. `count` if there is
// none.
int64_t best_place(const int32_t* tokens, int64_t count, int64_t least, int64_t most) {
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
  return best;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Writes `num_drafts` drafts of each row, which go on with themselves at the end of the text, or -1
// where nothing agrees; returns whether any row has drafts.
int32_t quire_propose_ngrams(const int32_t* tokens, int64_t stride, const int32_t* num_tokens,
                             const int32_t* rows, int64_t num_rows, int64_t least, int64_t most,
                             int64_t num_drafts, int32_t* drafts) {
  int32_t any = 0;
  for (int64_t i = 0; i < num_rows; ++i) {
    const int32_t* row = tokens + rows[i] * stride;
    const int64_t count = num_tokens[rows[i]];
    const int64_t place = best_place(row, count, least, most);
    for (int64_t j = 0, from = place; j < num_drafts; ++j) {
      drafts[i * num_drafts + j] = place < count ? row[from] : -1;
      if (++from == count) from = place;
    }
    any |= place < count;
  }
  return any;
}

}  // extern "C"
#pragma GCC visibility pop
