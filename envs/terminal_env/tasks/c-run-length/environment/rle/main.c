#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rle.h"

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "decode") == 0) {
        if (rle_decode(stdin, stdout) != 0) {
            fprintf(stderr, "rle: malformed input\n");
            return 1;
        }
        return 0;
    }
    if (argc != 2 || strcmp(argv[1], "encode") != 0) {
        fprintf(stderr, "usage: rle encode|decode\n");
        return 2;
    }
    size_t size = 0, room = 4096;
    unsigned char *data = malloc(room);
    size_t got;
    while ((got = fread(data + size, 1, room - size, stdin)) > 0) {
        size += got;
        if (size == room)
            data = realloc(data, room *= 2);
    }
    rle_encode(data, size, stdout);
    free(data);
    return 0;
}
