cd /workspace
cat > redact <<'PERL'
#!/usr/bin/perl
use strict;
use warnings;
binmode STDIN;
binmode STDOUT;

sub card {
    my ($text) = @_;
    (my $digits = $text) =~ tr/0-9//cd;
    my $sum = 0;
    for my $place (0 .. 15) {
        my $digit = substr $digits, 15 - $place, 1;
        $digit *= 2 if $place % 2;
        $sum += $digit > 9 ? $digit - 9 : $digit;
    }
    return $sum % 10 ? $text : "<card " . substr($digits, 12) . ">";
}

my $byte = qr/25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9]/;
while (my $line = <STDIN>) {
    $line =~ s/(?<![A-Za-z0-9_])((?:password|token|secret)[=:] *)[^ ,;\r\n]+/$1***/gi;
    $line =~ s/[A-Za-z0-9._%+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+/<email>/g;
    $line =~ s/(?<![0-9])(?<![0-9]\.)(?:$byte\.){3}$byte(?!\.?[0-9])/<ip>/g;
    $line =~ s/(?<![0-9])([0-9]{16}|[0-9]{4}(?: [0-9]{4}){3}|[0-9]{4}(?:-[0-9]{4}){3})(?![0-9])/card($1)/ge;
    print $line;
}
PERL
chmod +x redact
./redact < sample.log
