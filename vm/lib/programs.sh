# shellcheck shell=bash
# Debian's programs with the libraries that they load, unpacked but not installed. Sourced; needs
# tools.sh.

# program_files PACKAGE: a line "FILE=/PLACE" for each file that the guest needs to run the program
# of the same name (of e2fsprogs: mke2fs and e2fsck); fetched when the cache has none.
program_files() {
    local cache folder
    cache=$(cache_folder)
    folder=$cache/$1
    locked "$cache/.lock" fetch_program "$1" "$folder" >&2
    find "$folder" -type f -printf "%p=/%P\n"
}

fetch_program() {
    local name=$1 folder=$2 work packages program programs=("$1")
    [ ! -d "$folder" ] || return 0
    [ "$name" != e2fsprogs ] || programs=(mke2fs e2fsck)
    need dpkg-deb:dpkg
    # Storage programs link to many libraries, and these to others; python and the rest are for
    # other uses of the package.
    mapfile -t packages < <(apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks \
        --no-replaces --no-enhances "$name" | grep -E "^($name|lib[a-z0-9.+-]+)\$" | grep -vE '^lib(python|perl)' | sort -u)
    [ "${#packages[@]}" -gt 1 ] || die "apt knows no $name. Please run: sudo apt-get update"
    say "fetching $name and $((${#packages[@]} - 1)) packages it depends on by apt, to be unpacked but not installed"
    work=$(fetched "${packages[@]}")
    mkdir -p "$work/files/bin" "$work/files/lib/x86_64-linux-gnu" "$work/files/lib64"
    for program in "${programs[@]}"; do
        cp "$(find "$work/root" -path "*bin/$program" -type f)" "$work/files/bin/$program"
        copy_libraries "$work/root" "$work/files/bin/$program" "$work/files/lib/x86_64-linux-gnu" ||
            { rm -rf "$work"; die "a library of $program was not found (named above)"; }
    done
    cp -L "$work/root/lib64/ld-linux-x86-64.so.2" "$work/files/lib64/"
    mv "$work/files" "$folder"
    rm -rf "$work"
}

# copy_libraries ROOT PROGRAM INTO: copies the libraries that PROGRAM loads, transitively, from
# ROOT.
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
