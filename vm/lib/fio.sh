# shellcheck shell=bash
# Debian's fio with the libraries that it loads, unpacked but not installed. Sourced; needs tools.sh.

# fio_files: a line "FILE=/PLACE" for each file that the guest needs; fetched when the cache has none.
fio_files() {
    local cache folder
    cache=$(cache_folder)
    folder=$cache/fio
    locked "$cache/.lock" fetch_fio "$folder" >&2
    find "$folder" -type f -printf "%p=/%P\n"
}

fetch_fio() {
    local folder=$1 work packages
    [ ! -d "$folder" ] || return 0
    need dpkg-deb:dpkg
    # fio links to many storage libraries, and these to others; python and the rest are for its plots.
    mapfile -t packages < <(apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks \
        --no-replaces --no-enhances fio | grep -E '^(fio|lib[a-z0-9.+-]+)$' | grep -vE '^lib(python|perl)' | sort -u)
    [ "${#packages[@]}" -gt 1 ] || die "apt knows no fio. Please run: sudo apt-get update"
    say "fetching fio and ${#packages[@]} packages it depends on by apt, to be unpacked but not installed"
    work=$(fetched "${packages[@]}")
    mkdir -p "$work/fio/bin" "$work/fio/lib/x86_64-linux-gnu" "$work/fio/lib64"
    cp "$work/root/usr/bin/fio" "$work/fio/bin/"
    copy_libraries "$work/root" "$work/fio/bin/fio" "$work/fio/lib/x86_64-linux-gnu" ||
        { rm -rf "$work"; die "a library of fio was not found (named above)"; }
    cp -L "$work/root/lib64/ld-linux-x86-64.so.2" "$work/fio/lib64/"
    mv "$work/fio" "$folder"
    rm -rf "$work"
}

# copy_libraries ROOT PROGRAM INTO: copies the libraries that PROGRAM loads, transitively, from ROOT.
copy_libraries() {
    local root=$1 program=$2 into=$3 folders name path
    folders=$(find "$root" -name '*.so*' -printf '%h\n' | sort -u | paste -sd:)
    while read -r name _ path _; do
        case $name in linux-vdso.so.1 | /*) continue ;; esac
        if [ "$path" = not ]; then
            say "$name is missing"
            return 1
        fi
        cp -L "$path" "$into/$name"
    done < <("$root/lib64/ld-linux-x86-64.so.2" --inhibit-cache --library-path "$folders" --list "$program")
}
