/* The search of sudoku.py for one processor: the same boards in the same order, so that counts,
 * guesses and solutions are the same. sudoku.py says what they mean.
 *
 * A board is a row of cells, each a mask with one bit per digit that it may still hold. The caller
 * owns all memory.
 */

#include <stdint.h>
#include <string.h>

#define LARGEST 16
#define UNITS (3 * LARGEST)
#define CELLS (LARGEST * LARGEST)

typedef uint16_t mask;

typedef struct {
    int size, cells, peers;
    mask full;
    uint8_t unit[UNITS][LARGEST];  /* cells of each unit */
    uint8_t units_of[CELLS][3];    /* row, column and box of each cell */
    uint8_t peer[CELLS][3 * LARGEST]; /* the other cells of its units, each once */
} geometry;

/* Fills in the geometry; `units` holds 3 * size rows of cells. */
void describe(geometry *geo, int size, const int64_t *units)
{
    memset(geo, 0, sizeof *geo);
    geo->size = size;
    geo->cells = size * size;
    geo->full = (mask)((1u << size) - 1);
    for (int u = 0; u < 3 * size; u++)
        for (int i = 0; i < size; i++) {
            int cell = (int)units[u * size + i];
            geo->unit[u][i] = (uint8_t)cell;
            geo->units_of[cell][u / size] = (uint8_t)u;
        }
    for (int cell = 0; cell < geo->cells; cell++) {
        uint8_t seen[CELLS] = {0};
        seen[cell] = 1;
        geo->peers = 0;
        for (int k = 0; k < 3; k++)
            for (int i = 0; i < size; i++) {
                int other = geo->unit[geo->units_of[cell][k]][i];
                if (!seen[other])
                    geo->peer[cell][geo->peers++] = (uint8_t)other;
                seen[other] = 1;
            }
    }
}

static inline int single(mask m) { return !(m & (m - 1)); }

static inline int bits(mask m)
{
    int count = 0;
    for (; m; m &= (mask)(m - 1))
        count++;
    return count;
}

typedef struct {
    int length;
    uint8_t cell[CELLS];
    mask left[UNITS]; /* digits without a cell yet */
} queue;

/* The cell holds one digit: no other cell of its units does. Returns 0 if one has to. */
static inline int place(const geometry *geo, const mask *board, queue *todo, int cell)
{
    mask digit = board[cell];
    for (int k = 0; k < 3; k++) {
        mask *left = &todo->left[geo->units_of[cell][k]];
        if (!(*left & digit))
            return 0;
        *left ^= digit;
    }
    todo->cell[todo->length++] = (uint8_t)cell;
    return 1;
}

static inline int strip_peers(const geometry *geo, mask *board, queue *todo, int peers)
{
    while (todo->length) {
        int cell = todo->cell[--todo->length];
        mask digit = board[cell];
        for (int i = 0; i < peers; i++) {
            int other = geo->peer[cell][i];
            if (!(board[other] & digit))
                continue;
            board[other] &= (mask)~digit;
            if (!board[other] || (single(board[other]) && !place(geo, board, todo, other)))
                return 0;
        }
    }
    return 1;
}

static inline int hidden_singles(const geometry *geo, mask *board, queue *todo, int size)
{
    for (int u = 0; u < 3 * size; u++) {
        mask once = 0, more = 0;
        for (int i = 0; i < size; i++) {
            mask member = board[geo->unit[u][i]];
            more |= once & member;
            once |= member;
        }
        if (once != geo->full)
            return 0;
        once &= (mask)(~more & todo->left[u]);
        for (int i = 0; once && i < size; i++) {
            int cell = geo->unit[u][i];
            mask hidden = board[cell] & once;
            if (!hidden)
                continue;
            once ^= hidden;
            if (!single(hidden))
                return 0;
            board[cell] = hidden;
            if (!place(geo, board, todo, cell))
                return 0;
        }
    }
    return 1;
}

/* Naked and hidden singles, until nothing follows any more. Returns whether the board is possible;
 * what follows does not depend on the order.
 */
static inline int propagate(const geometry *geo, mask *board, int size, int peers)
{
    queue todo = {.length = 0};
    for (int u = 0; u < 3 * size; u++)
        todo.left[u] = geo->full;
    for (int cell = 0; cell < size * size; cell++)
        if (!board[cell] || (single(board[cell]) && !place(geo, board, &todo, cell)))
            return 0;
    do {
        if (!strip_peers(geo, board, &todo, peers) || !hidden_singles(geo, board, &todo, size))
            return 0;
    } while (todo.length);
    return 1;
}

static int possible(const geometry *geo, mask *board)
{
    switch (geo->size) { /* constants, so that the compiler unrolls the loops */
    case 4: return propagate(geo, board, 4, 7);
    case 6: return propagate(geo, board, 6, 12);
    case 9: return propagate(geo, board, 9, 20);
    default: return propagate(geo, board, geo->size, geo->peers);
    }
}

/* The first of the cells with the fewest digits, at least two; -1 if the board is solved. */
static int fewest(const mask *board, int cells)
{
    int best = -1, least = LARGEST + 1;
    for (int cell = 0; cell < cells && least > 2; cell++)
        if (!single(board[cell])) {
            int choices = bits(board[cell]);
            if (choices < least)
                best = cell, least = choices;
        }
    return best;
}

typedef struct {
    int64_t limit, most_guesses, width;
    int64_t *counts, *guesses; /* of each owner */
    mask *solutions;           /* cells of each owner */
} search;

/* Guesses once in each of the last boards of the stack, as `search` in sudoku.py does in a round.
 * Returns the new depth; the stack has room for another `width` boards.
 */
static int64_t one_round(
    const geometry *geo, const search *to, mask *stack, int64_t *owners, int64_t depth)
{
    const int cells = geo->cells;
    const size_t bytes = (size_t)cells * sizeof(mask);
    int64_t base = depth > to->width ? depth - to->width : 0, open = base, kept = 0;
    for (int64_t i = base; i < depth; i++) {
        mask *board = stack + i * cells;
        if (!possible(geo, board))
            continue;
        if (fewest(board, cells) < 0) {
            to->counts[owners[i]]++;
            memcpy(to->solutions + owners[i] * cells, board, bytes);
            continue;
        }
        memmove(stack + open * cells, board, bytes);
        owners[open++] = owners[i];
    }
    int64_t end = base; /* only now is it known which boards have enough solutions */
    for (int64_t i = base; i < open; i++)
        if (to->counts[owners[i]] < to->limit) {
            memmove(stack + end * cells, stack + i * cells, bytes);
            owners[end++] = owners[i];
        }
    for (int64_t i = base; i < end; i++)
        if (++to->guesses[owners[i]] > to->most_guesses)
            to->counts[owners[i]] = to->limit;
    for (int64_t i = 0; i < base; i++)
        if (to->counts[owners[i]] < to->limit) {
            if (kept < i)
                memcpy(stack + kept * cells, stack + i * cells, bytes);
            owners[kept++] = owners[i];
        }
    const int64_t guessed = end - base;
    memmove(stack + kept * cells, stack + base * cells, (size_t)guessed * bytes);
    memmove(owners + kept, owners + base, (size_t)guessed * sizeof *owners);
    memcpy(stack + (kept + guessed) * cells, stack + kept * cells, (size_t)guessed * bytes);
    memcpy(owners + kept + guessed, owners + kept, (size_t)guessed * sizeof *owners);
    for (int64_t i = kept; i < kept + guessed; i++) {
        mask *rest = stack + i * cells, *lowest = rest + guessed * cells;
        int cell = fewest(rest, cells);
        lowest[cell] &= (mask)-lowest[cell];
        rest[cell] ^= lowest[cell];
    }
    return kept + 2 * guessed;
}

/* Rounds until the stack is empty, is too small for another, or `boards` boards have been looked
 * at. Returns the new depth.
 */
int64_t go_on(const geometry *geo, const search *to, mask *stack, int64_t *owners, int64_t depth,
    int64_t room, int64_t boards)
{
    while (depth && boards > 0) {
        int64_t top = depth < to->width ? depth : to->width;
        if (depth + top > room)
            break;
        depth = one_round(geo, to, stack, owners, depth);
        boards -= top;
    }
    return depth;
}
