/* Attention of one new token a sequence, as the operator: caches of all types, batches and
 * contexts from short to long. Some rows of each result are held against a double-precision softmax
 * over the same codes; then graph replays over enough caches that none is found in the L2. Exit 1
 * when a result is wrong. */
#include "attention.cuh"

static const char *const names[KV_TYPES] = {"bf16", "e4m3", "e5m2", "int8", "fp4 ", "f32 "};

/* together: pages that sequences share are read once. */
static int one(const attention_case &c, double roof, cudaStream_t st, bool together = true)
{
    if (2.0 * c.seqs * c.len * c.Hk * c.D * 2 > 60e9) return 0;
    attention_bench s(c, true);
    if (!together) s.a.seqs.n_groups = 0;
    const char *why = cuda_attention(&s.a, st), *name = names[c.type];
    if (why) {
        printf("%s B %d len %d: %s\n", name, c.seqs, c.len, why);
        return 1;
    }
    CK(cudaStreamSynchronize(st));
    std::vector<int> look = {0};
    if (c.seqs > 1 && c.len < 10000) look.push_back(c.seqs - 1);
    const double err = s.error(look);
    const double us = time_graph(st, 16, [&](int i) {
        s.use(i);
        cuda_attention(&s.a, st);
    });
    const int seen = c.window ? std::min(c.window, c.len) : c.len;
    const double read = (double)s.head / KV_PLACE_TOKENS * c.seqs * seen * c.Hk;
    const int bad = !(err < 4e-3); /* probabilities are rounded to 16 bits */
    if (c.shared)
        printf("%s B %3d len %6d, %d shared %s heads %2dx%d D %3d %8.2f us  err %.1e%s\n", name,
               c.seqs, c.len, c.shared * KV_PLACE_TOKENS, s.a.seqs.n_groups ? "once" : "by each",
               c.Hk, c.G, c.D, us, err, bad ? " WRONG" : "");
    else
        printf("%s B %3d len %6d%s heads %2dx%d D %3d %8.2f us %5.2f TB/s %3.0f %%  err %.1e%s\n",
               name, c.seqs, c.len, c.window ? " (window)" : "", c.Hk, c.G, c.D, us,
               read / us / 1e6, 100 * read / us / 1e6 / roof, err, bad ? " WRONG" : "");
    return bad;
}

int main(void)
{
    /* seqs, len, Hk, G, D, window; the ones past a power of two have the work divided for more */
    static const int cases[][6] = {
        {1, 128, 8, 4, 128, 0},   {1, 2048, 8, 4, 128, 0},   {1, 2100, 8, 4, 128, 0},
        {1, 8192, 8, 4, 128, 0},  {1, 65536, 8, 4, 128, 0},  {4, 8192, 8, 4, 128, 0},
        {8, 2048, 8, 4, 128, 0},  {16, 2048, 8, 4, 128, 0},  {20, 2048, 8, 4, 128, 0},
        {64, 2048, 8, 4, 128, 0}, {16, 32768, 8, 4, 128, 0}, {64, 2048, 8, 4, 128, 512},
        {3, 517, 4, 7, 64, 0},    {16, 2048, 8, 4, 64, 0},   {8, 2048, 2, 16, 128, 0},
        {8, 2048, 4, 2, 256, 0},  {8, 2048, 8, 4, 96, 0}};
    int bad = 0, n = 0;
    cudaStream_t st;
    cudaDeviceProp p;
    if (!open_device("decode", &p, &st)) return 0;
    const double roof = measure_roof(st);
    printf("%s, read roof %.2f TB/s\n", p.name, roof);
    for (auto &k : cases)
        for (int type = 0; type < KV_F32; type++) {
            bad += one({type, k[0], 1, k[1], k[2], k[3], k[4], k[5], 0}, roof, st);
            n++;
        }
    for (int type = 0; type < KV_F32; type++) /* 64 sequences of 2048, of which 1536 shared */
        for (bool together : {false, true}) {
            bad += one({type, 64, 1, 2048, 8, 4, 128, 0, 48}, roof, st, together);
            n++;
        }
    printf("decode: %d cases, %d wrong\n", n, bad);
    return bad != 0;
}
