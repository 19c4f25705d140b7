#include "kern/backend.h"
int kern__gpu_open(kern_dev **out, const kern_opts *o, err *e){(void)out;return err_set(e,ERR_UNSUPPORTED,"%s",o->device);}
