# shellcheck shell=bash
# The guest's only file system: busybox, the kernel's modules, `init`, and the programs under test. Sourced
# where `vm_folder` and `repo_folder` are known.
# shellcheck disable=SC2154

# make_initramfs KERNEL_FOLDER FILE WORK ENTRY...: an ENTRY is FILE=PATH, a file of the host and its place in the guest.
make_initramfs() {
    local kernel=$1 archive=$2 root=$3/root entry
    shift 3
    mkdir -p "$root"/{bin,dev,proc,sys,tmp,modules,share}
    cp "$(static_busybox)" "$root/bin/busybox"
    ln -s busybox "$root/bin/sh"
    cp "$vm_folder/guest/init" "$root/init"
    if compgen -G "$kernel/modules/*.ko" >/dev/null; then
        cp "$kernel"/modules/*.ko "$root/modules/"
    fi
    for entry in "$@"; do
        mkdir -p "$root/$(dirname "${entry#*=}")"
        cp "${entry%%=*}" "$root/${entry#*=}"
    done
    # Not compressed: it is read by DMA, and unpacking is what would take long under emulation.
    (cd "$root" && find . -mindepth 1 -printf '%P\n' | cpio --quiet -o -H newc -R 0:0) >"$archive"
    rm -rf "$root"
}

static_busybox() {
    local path
    path=$(command -v busybox) || die "no busybox although busybox-static is installed"
    printf '%s\n' "$path"
}

# build_pinfold: the program, statically linked; prints where it is.
build_pinfold() {
    local target=x86_64-unknown-linux-gnu folder=$repo_folder/target/vm
    command -v cargo >/dev/null || die "no cargo to build Pinfold with: see README, or name a program with --pinfold FILE"
    (
        cd "$repo_folder"
        RUSTFLAGS="-C target-feature=+crt-static" cargo build --quiet --release --locked \
            --target "$target" --target-dir "$folder" -p pinfold-cli
    ) >&2 || die "Pinfold does not build"
    printf '%s\n' "$folder/$target/release/pinfold"
}
