/* Characters of valid UTF-8 and their classes as the Hugging Face library asks them of Rust (the
 * tables are in tok_unicode.c), and the byte-level alphabet of GPT-2: a byte that is a printable
 * Latin-1 character stands for itself, the other 68 are written as U+0100, U+0101 … in byte order.
 */
#include <pthread.h>
#include "base/utf8.h"
#include "text/tok_internal.h"

const char tok__gpt2_pattern[] =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

char tok__byte_char[256][2];
uint8_t tok__byte_char_len[256];
static int16_t char_byte[0x144];

static void fill_byte_chars(void)
{
    uint32_t next = 0x100;
    for (size_t i = 0; i < sizeof char_byte / sizeof *char_byte; i++)
        char_byte[i] = -1;
    for (uint32_t b = 0; b < 256; b++) {
        bool self = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
        uint32_t cp = self ? b : next++;
        char u[4];
        int n = utf8_encode(cp, u);
        tok__byte_char[b][0] = u[0];
        tok__byte_char[b][1] = n > 1 ? u[1] : 0;
        tok__byte_char_len[b] = (uint8_t)n;
        char_byte[cp] = (int16_t)b;
    }
}

void tok__bytelevel_init(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, fill_byte_chars);
}

int tok__char_byte(uint32_t cp)
{
    return cp < sizeof char_byte / sizeof *char_byte ? char_byte[cp] : -1;
}

bool tok__is_space(uint32_t cp)
{
    if (cp < 0x80) return cp == ' ' || (cp >= 9 && cp <= 13);
    return cp == 0x85 || cp == 0xA0 || cp == 0x1680 || (cp >= 0x2000 && cp <= 0x200A) ||
           cp == 0x2028 || cp == 0x2029 || cp == 0x202F || cp == 0x205F || cp == 0x3000;
}

bool tok__is_word(uint32_t cp)
{
    if (cp < 0x80)
        return (cp >= '0' && cp <= '9') || (cp >= 'a' && cp <= 'z') || (cp >= 'A' && cp <= 'Z') ||
               cp == '_';
    return tok__is(TOK_WORD, cp);
}

bool tok__is_numeric(uint32_t cp)
{
    return cp < 0x80 ? cp >= '0' && cp <= '9' : tok__is(TOK_NUMERIC, cp);
}

bool tok__is_punct(uint32_t cp)
{
    return tok__is(TOK_PUNCT, cp);
}

int tok__cp(const char *s, size_t n, uint32_t *cp)
{
    if (!((unsigned char)*s & 0x80)) {
        *cp = (unsigned char)*s;
        return 1;
    }
    int k = utf8_decode(s, n, cp);
    if (k) return k;
    *cp = 0xFFFD; /* cannot happen on valid text; never stand still */
    return 1;
}

int tok__cp_before(const char *s, size_t n, uint32_t *cp)
{
    size_t i = n - 1;
    while (i > 0 && n - i < 4 && ((unsigned char)s[i] & 0xC0) == 0x80)
        i--;
    tok__cp(s + i, n - i, cp);
    return (int)(n - i);
}
