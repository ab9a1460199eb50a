#include "rle.h"

void rle_encode(const unsigned char *data, size_t length, FILE *out)
{
    char count = 1;
    for (size_t i = 1; i < length; i++) {
        if (data[i] == data[i - 1]) {
            count++;
        } else {
            fprintf(out, "%d %02x\n", count, data[i - 1]);
            count = 1;
        }
    }
}

int rle_decode(FILE *in, FILE *out)
{
    unsigned long count;
    unsigned int value;
    while (fscanf(in, "%lu %x\n", &count, &value) == 2) {
        for (unsigned long i = 0; i <= count; i++)
            fputc(value, out);
    }
    return 0;
}
