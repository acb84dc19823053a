# shellcheck shell=bash
# The guest's only file system: busybox, the kernel's modules, `init`, and the programs under test.
# Sourced with `vm_folder` and `repo_folder` set.
# shellcheck disable=SC2154

# make_initramfs KERNEL_FOLDER FILE WORK ENTRY...: an ENTRY is FILE=PATH, a file of the host and its
# place in the guest.
make_initramfs() {
    local kernel=$1 archive=$2 root=$3/root busybox entry
    shift 3
    busybox=$(static_busybox)
    mkdir -p "$root"/{bin,dev,proc,sys,tmp,modules,share}
    cp "$busybox" "$root/bin/busybox"
    ln -s busybox "$root/bin/sh"
    cp "$vm_folder/guest/init" "$root/init"
    if compgen -G "$kernel/modules/*.ko" >/dev/null; then
        cp "$kernel"/modules/*.ko "$root/modules/"
    fi
    for entry in "$@"; do
        mkdir -p "$root/$(dirname "${entry#*=}")"
        cp "${entry%%=*}" "$root/${entry#*=}"
    done
    # Not compressed: reading it is DMA, and decompressing is slow under emulation.
    (cd "$root" && find . -mindepth 1 -printf '%P\n' | "$busybox" cpio -o -H newc -R 0:0 2>/dev/null) >"$archive"
    rm -rf "$root"
}

# static_busybox: prints the path of this machine's, if statically linked, else of Debian's,
# unpacked into the cache.
static_busybox() {
    local path cache
    path=$(command -v busybox || true)
    if [ -z "$path" ] || ldd "$path" >/dev/null 2>&1; then
        cache=$(cache_folder)
        path=$cache/busybox
        locked "$cache/.lock" fetch_busybox "$path" >&2
    fi
    printf '%s\n' "$path"
}

fetch_busybox() {
    local path=$1 work
    [ ! -e "$path" ] || return 0
    need dpkg-deb:dpkg
    work=$(fetched busybox-static)
    cp "$(find "$work/root" -path '*bin/busybox' -type f)" "$path.new"
    mv "$path.new" "$path"
    rm -rf "$work"
}

# build_pinfold: builds the program, statically linked; prints its path.
build_pinfold() {
    local target=x86_64-unknown-linux-gnu folder=$repo_folder/target/vm
    command -v cargo >/dev/null || die "cargo is missing: see README, or pass a program with --pinfold FILE"
    (
        cd "$repo_folder"
        RUSTFLAGS="-C target-feature=+crt-static" cargo build --quiet --release --locked \
            --target "$target" --target-dir "$folder" -p pinfold-cli
    ) >&2 || die "Pinfold does not build"
    printf '%s\n' "$folder/$target/release/pinfold"
}
