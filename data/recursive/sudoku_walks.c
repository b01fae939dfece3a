/* Walks from puzzle to puzzle on one solved board of 9 x 9, towards more guesses: the steps of
 * sudoku_extreme.py.
 *
 * A board is 81 cells, each a mask with one bit per digit that it may still hold. The search keeps
 * LANES boards side by side, a vector per cell. The caller owns all memory.
 */

#include <stdint.h>
#include <string.h>

#define SIZE 9
#define CELLS 81
#define UNITS 27
#define FULL 511
#define ROOM 2048      /* boards on the stack of a search */
#define IMAGES 8       /* of a puzzle, whose level leads the walk */
#define CHECKS 16      /* other images, whose level says whether the puzzle is hard enough */
#define REMEMBERED 512 /* other boards that a walk keeps in mind */

#if defined(__x86_64__) && defined(__GLIBC__)
#define LANES 16 /* an AVX register; processors without AVX get slower code */
#define FOR_THIS_PROCESSOR __attribute__((target_clones("avx2", "default")))
#else
#define LANES 8
#define FOR_THIS_PROCESSOR
#endif

typedef uint16_t mask;
typedef mask lanes __attribute__((vector_size(sizeof(mask) * LANES)));

typedef struct {
    mask cell[CELLS];
    int32_t owner;
} node;

typedef struct {
    uint64_t random;
    int64_t level; /* of the images together */
    int64_t extra; /* cells given at each step */
    uint64_t known[REMEMBERED][2]; /* where other boards differ from the answer */
    int64_t remembered;
    mask answer[CELLS];
    uint8_t given[CELLS];
    uint8_t image[IMAGES + CHECKS][CELLS]; /* where each cell's content comes from */
    uint8_t unit[UNITS][SIZE];             /* cells of each row, column and box */
    node stack[ROOM];
} walk;

int64_t walk_bytes(void) { return sizeof(walk); }

/* Naked and hidden singles of one unit. */
static inline __attribute__((always_inline)) void look_at(
    const uint8_t *unit, lanes *board, lanes *dead, lanes *changed)
{
    lanes cell[SIZE], single[SIZE], taken = {0}, sum = {0}, once = {0}, more = {0};
    for (int i = 0; i < SIZE; i++) {
        cell[i] = board[unit[i]];
        single[i] = (lanes)((cell[i] & (cell[i] - 1)) == 0);
        taken |= cell[i] & single[i];
        sum += cell[i] & single[i];
    }
    for (int i = 0; i < SIZE; i++) {
        cell[i] &= single[i] | ~taken;
        more |= once & cell[i];
        once |= cell[i];
    }
    /* digits are powers of two: their sum is their union only where none stands twice */
    *dead |= (lanes)(sum != taken) | (lanes)(once != FULL);
    once &= ~more;
    for (int i = 0; i < SIZE; i++) {
        lanes hidden = cell[i] & once;
        hidden &= -hidden; /* of two, the other has no place any more */
        cell[i] = hidden | (cell[i] & (lanes)(hidden == 0));
        *changed |= cell[i] ^ board[unit[i]];
        board[unit[i]] = cell[i];
    }
}

static int any(const lanes *bits)
{
    for (int i = 0; i < LANES; i++)
        if ((*bits)[i])
            return 1;
    return 0;
}

typedef struct {
    lanes dead;
    lanes open; /* some cell holds several digits */
    lanes pair; /* the first cell that holds two, or CELLS */
} state;

/* Naked and hidden singles, until nothing follows any more in the first `used` lanes. */
FOR_THIS_PROCESSOR static void propagate(
    const uint8_t unit[UNITS][SIZE], lanes *board, int used, state *result)
{
    lanes live = {0}, dead = {0}, open = {0}, pair = {0}, changed;
    for (int i = 0; i < used; i++)
        live[i] = (mask)-1;
    do {
        memset(&changed, 0, sizeof changed);
        for (int u = 0; u < UNITS; u++)
            look_at(unit[u], board, &dead, &changed);
        changed &= live & ~dead;
    } while (any(&changed));
    pair += CELLS;
    for (mask cell = CELLS; cell-- > 0;) {
        lanes rest = board[cell] & (board[cell] - 1), here = {0};
        lanes two = (lanes)(rest != 0) & (lanes)((rest & (rest - 1)) == 0);
        pair = ((here + cell) & two) | (pair & ~two);
        open |= rest;
        dead |= (lanes)(board[cell] == 0);
    }
    result->dead = dead, result->open = open, result->pair = pair;
}

/* The first of the cells with the fewest digits, at least two. */
static int fewest(const mask *board)
{
    int best = 0, least = SIZE + 1;
    for (int cell = 0; cell < CELLS; cell++) {
        int digits = __builtin_popcount(board[cell * LANES]);
        if (digits > 1 && digits < least)
            best = cell, least = digits;
    }
    return best;
}

/* Searches the boards of the stack. Adds up, for each owner, solutions up to `limit` and guesses, as
 * `search` in sudoku.py does; `solutions` gets one for each owner unless it is null.
 */
static void search(walk *w, int depth, int64_t limit, int64_t *counts, int64_t *guesses,
    mask (*solutions)[CELLS])
{
    lanes board[CELLS];
    int32_t owner[LANES];
    state found;
    memset(board, 0, sizeof board);
    while (depth) {
        /* near the end of the stack one board at a time, which takes the least room */
        const int most = depth < ROOM - 4 * CELLS ? LANES : 1;
        int used = 0;
        while (depth && used < most) {
            const node *top = &w->stack[--depth];
            if (counts[top->owner] >= limit)
                continue;
            owner[used] = top->owner;
            mask *to = (mask *)board + used++;
            for (int cell = 0; cell < CELLS; cell++)
                to[cell * LANES] = top->cell[cell];
        }
        propagate(w->unit, board, used, &found);
        for (int lane = 0; lane < used; lane++) {
            const int mine = owner[lane];
            const mask *from = (const mask *)board + lane;
            if (found.dead[lane] || counts[mine] >= limit)
                continue;
            node *rest = &w->stack[depth], *lowest = rest + 1;
            for (int cell = 0; cell < CELLS; cell++)
                rest->cell[cell] = from[cell * LANES];
            if (!found.open[lane]) {
                if (solutions)
                    memcpy(solutions[mine], rest->cell, sizeof rest->cell);
                counts[mine]++;
                continue;
            }
            guesses[mine]++;
            rest->owner = mine;
            *lowest = *rest;
            const int guess = found.pair[lane] < CELLS ? found.pair[lane] : fewest(from);
            lowest->cell[guess] &= (mask)-lowest->cell[guess];
            rest->cell[guess] ^= lowest->cell[guess];
            depth += 2;
        }
    }
}

/* 1024 times the logarithm of base 2, in integers: the same on every machine. */
static int64_t log2_of(int64_t number)
{
    const int whole = 63 - __builtin_clzll((uint64_t)number);
    uint64_t rest = (uint64_t)number << (31 - whole); /* 2^31 stands for 1 */
    int64_t result = whole;
    for (int bit = 0; bit < 10; bit++) {
        rest = rest * rest >> 31;
        const int more = (int)(rest >> 32);
        rest >>= more;
        result = 2 * result + more;
    }
    return result;
}

/* How often a search guesses in each of these images of the puzzle. Returns their level together,
 * the logarithms of one more than these numbers: a sum of guesses would find puzzles that are very
 * hard in one image and easy in most.
 */
static int64_t level_of(walk *w, const uint8_t *given, int first, int images, int64_t *guesses)
{
    int64_t counts[IMAGES + CHECKS] = {0}, level = 0;
    for (int i = 0; i < images; i++) {
        for (int cell = 0; cell < CELLS; cell++) {
            const int from = w->image[first + i][cell];
            w->stack[i].cell[cell] = given[from] ? w->answer[from] : FULL;
        }
        w->stack[i].owner = i;
        guesses[i] = 0;
    }
    search(w, images, 2, counts, guesses, 0);
    for (int i = 0; i < images; i++)
        level += log2_of(guesses[i] + 1);
    return level;
}

static int one_bit(uint64_t bits) { return bits && !(bits & (bits - 1)); }

/* The clues of which a remembered board says that they are needed: it differs from the answer in no
 * other.
 */
static void find_needed(const walk *w, const uint64_t *clues, uint64_t *needed)
{
    needed[0] = needed[1] = 0;
    for (int64_t i = 0; i < w->remembered && i < REMEMBERED; i++) {
        const uint64_t low = w->known[i][0] & clues[0], high = w->known[i][1] & clues[1];
        if (low ? !high && one_bit(low) : one_bit(high))
            needed[0] |= low, needed[1] |= high;
    }
}

/* Keeps those of the clues without which the answer stays the only one; returns how many. */
static int not_needed(walk *w, const uint8_t *given, uint8_t *clue, int clues)
{
    uint64_t bits[2] = {0}, needed[2];
    mask solutions[CELLS][CELLS];
    int64_t counts[CELLS] = {0}, guesses[CELLS] = {0};
    int asked = 0, free = 0;
    for (int cell = 0; cell < CELLS; cell++)
        bits[cell / 64] |= (uint64_t)given[cell] << cell % 64;
    find_needed(w, bits, needed);
    for (int i = 0; i < clues; i++)
        if (!(needed[clue[i] / 64] >> clue[i] % 64 & 1))
            clue[asked++] = clue[i];
    for (int i = 0; i < asked; i++) {
        node *without = &w->stack[i];
        for (int cell = 0; cell < CELLS; cell++)
            without->cell[cell] = given[cell] ? w->answer[cell] : FULL;
        /* it was unique: it stays so if no solution has another digit in this cell */
        without->cell[clue[i]] = FULL & (mask)~w->answer[clue[i]];
        without->owner = i;
    }
    search(w, asked, 1, counts, guesses, solutions);
    for (int i = 0; i < asked; i++) {
        if (!counts[i]) {
            clue[free++] = clue[i];
            continue;
        }
        uint64_t *differs = w->known[w->remembered++ % REMEMBERED];
        differs[0] = differs[1] = 0;
        for (int cell = 0; cell < CELLS; cell++)
            differs[cell / 64] |= (uint64_t)(solutions[i][cell] != w->answer[cell]) << cell % 64;
    }
    return free;
}

/* Takes clues away in this order, as long as the solution stays the only one. */
static void lose(walk *w, uint8_t *given, uint8_t *clue, int clues)
{
    /* what is needed now stays so, however few are left */
    while ((clues = not_needed(w, given, clue, clues))) {
        given[*clue] = 0;
        clue++, clues--;
    }
}

static int below(walk *w, int bound)
{
    uint64_t bits = w->random += UINT64_C(0x9e3779b97f4a7c15); /* splitmix64 */
    bits = (bits ^ bits >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    bits = (bits ^ bits >> 27) * UINT64_C(0x94d049bb133111eb);
    return (int)(((bits ^ bits >> 31) >> 32) * (uint64_t)bound >> 32);
}

/* The first `count` cells become a random choice of all. */
static void shuffle(walk *w, uint8_t *cells, int count, int all)
{
    for (int i = 0; i < count; i++) {
        const int other = i + below(w, all - i);
        const uint8_t cell = cells[other];
        cells[other] = cells[i];
        cells[i] = cell;
    }
}

/* The first puzzle: a random one that can lack no clue. */
void begin(walk *w)
{
    int64_t guesses[IMAGES];
    uint8_t clue[CELLS];
    for (int cell = 0; cell < CELLS; cell++)
        clue[cell] = (uint8_t)cell, w->given[cell] = 1;
    w->remembered = 0;
    shuffle(w, clue, CELLS, CELLS);
    lose(w, w->given, clue, CELLS);
    w->level = level_of(w, w->given, 0, IMAGES, guesses);
}

/* Gives a few cells, and takes away what the puzzle can lack, these cells last. Returns whether the
 * walk goes on from the new puzzle, whose level is no lower than the last one's.
 */
static int took_step(walk *w)
{
    int64_t guesses[IMAGES];
    uint8_t given[CELLS], clue[CELLS], blank[CELLS];
    int clues = 0, blanks = 0;
    for (int cell = 0; cell < CELLS; cell++)
        if (w->given[cell])
            clue[clues++] = (uint8_t)cell;
        else
            blank[blanks++] = (uint8_t)cell;
    shuffle(w, clue, clues, clues);
    shuffle(w, blank, (int)w->extra, blanks);
    memcpy(given, w->given, CELLS);
    for (int i = 0; i < w->extra; i++)
        given[clue[clues++] = blank[i]] = 1;
    lose(w, given, clue, clues);
    if (!memcmp(given, w->given, CELLS))
        return 0;
    const int64_t level = level_of(w, given, 0, IMAGES, guesses);
    if (level < w->level)
        return 0;
    w->level = level;
    memcpy(w->given, given, CELLS);
    return 1;
}

/* Counts the guesses of all images. */
void measure(walk *w, int64_t *guesses) { level_of(w, w->given, 0, IMAGES + CHECKS, guesses); }

static int is_there(walk *w, int64_t wanted)
{
    int64_t guesses[CHECKS];
    /* the images that lead the walk are harder than others: a walk finds what is hard in them */
    return w->level >= wanted * IMAGES
        && level_of(w, w->given, IMAGES, CHECKS, guesses) >= wanted * CHECKS;
}

/* Takes so many steps, or fewer if a puzzle reaches the wanted level (of one image, in units of
 * 1/1024); returns whether one does.
 */
int64_t go_on(walk *w, int64_t wanted, int64_t steps)
{
    int new = 1; /* the present one has not been looked at */
    for (; steps >= 0; steps--) {
        if (new && is_there(w, wanted))
            return 1;
        new = steps && took_step(w);
    }
    return 0;
}
