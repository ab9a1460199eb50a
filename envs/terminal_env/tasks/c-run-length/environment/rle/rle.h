#ifndef RLE_H
#define RLE_H

#include <stddef.h>
#include <stdio.h>

/* Write the runs of data as lines "COUNT VALUE", VALUE as two lower-case hex digits. */
void rle_encode(const unsigned char *data, size_t length, FILE *out);

/* Read such lines and write the bytes they stand for. Returns 0, or -1 at the first malformed line. */
int rle_decode(FILE *in, FILE *out);

#endif
