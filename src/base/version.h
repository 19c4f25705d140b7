/* The program's version, in one place. */
#ifndef BASE_VERSION_H
#define BASE_VERSION_H
#define TARE_VERSION "0.1.0"
#endif
