/* The linear list in order of preference; the plain C twin is last. */
#include "kern/linear.h"

const kern_linear_row *const kern_linear_rows[] = {
    &kern__rows_amx[0],    &kern__rows_amx[1],       &kern__rows_amx[2],
    &kern__rows_amx[3],    &kern__rows_vnni[0],      &kern__rows_vnni[1],
    &kern__rows_avx512[0], &kern__rows_avx512[1],    &kern__rows_avx512[2],
    &kern__rows_avx512[3], &kern__rows_avx2_int8[0], &kern__rows_avx2_int8[1],
    &kern__rows_avx2[0],   &kern__rows_avx2[1],      &kern__rows_avx2[2],
    &kern__rows_avx2[3],   &kern__row_ref,
};
const int kern_n_linear_rows = (int)(sizeof kern_linear_rows / sizeof *kern_linear_rows);
