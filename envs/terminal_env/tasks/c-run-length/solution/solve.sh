cd /workspace/rle
sed -i 's/^rle: main.o$/rle: main.o rle.o/; s/^    \$(CC)/\t$(CC)/' Makefile
cat > rle.c <<'EOF'
#include "rle.h"

#include <stdlib.h>

void rle_encode(const unsigned char *data, size_t length, FILE *out)
{
    size_t start = 0;
    for (size_t i = 1; i <= length; i++) {
        if (i == length || data[i] != data[start]) {
            fprintf(out, "%zu %02x\n", i - start, data[start]);
            start = i;
        }
    }
}

int rle_decode(FILE *in, FILE *out)
{
    char line[128];
    while (fgets(line, sizeof line, in)) {
        char *end;
        unsigned long count = strtoul(line, &end, 10);
        if (end == line || *end != ' ' || count == 0)
            return -1;
        char *hex = end + 1;
        unsigned long value = strtoul(hex, &end, 16);
        if (end == hex || *end != '\n' || value > 0xff)
            return -1;
        for (unsigned long i = 0; i < count; i++)
            fputc((int)value, out);
    }
    return 0;
}
EOF
make -s clean all && printf 'aaab' | ./rle encode && printf 'aaab' | ./rle encode | ./rle decode
