//! The man page: one for the program and all its commands, from the definition of the command line.

use clap::Command;
use clap_mangen::Man;
use std::io;

/// The page.
pub(crate) fn page(mut cli: Command) -> io::Result<Vec<u8>> {
    cli.build();
    let mut page = Vec::new();
    let man = Man::new(cli.clone());
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_options_section(&mut page)?;
    for command in cli.get_subcommands().filter(|command| command.get_name() != "help") {
        heading(&mut page, &format!("COMMAND {}", command.get_name().to_uppercase()));
        let man = Man::new(command.clone());
        man.render_description_section(&mut page)?;
        man.render_synopsis_section(&mut page)?;
        man.render_options_section(&mut page)?;
        notes(&mut page, command);
    }
    heading(&mut page, "ALL COMMANDS");
    notes(&mut page, &cli);
    Ok(page)
}

fn heading(page: &mut Vec<u8>, text: &str) {
    page.extend_from_slice(format!(".SH \"{text}\"\n").as_bytes());
}

/// What `--help` says behind the options, line by line as it is there.
fn notes(page: &mut Vec<u8>, command: &Command) {
    let Some(text) = command.get_after_long_help() else { return };
    page.extend_from_slice(b".SS NOTES\n.nf\n");
    for line in text.to_string().lines() {
        page.extend_from_slice(escaped(line).as_bytes());
        page.push(b'\n');
    }
    page.extend_from_slice(b".fi\n");
}

/// A line that troff prints as it is.
fn escaped(line: &str) -> String {
    let line = line.replace('\\', "\\e").replace('-', "\\-");
    if line.starts_with(['.', '\'']) { format!("\\&{line}") } else { line }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_no_requests() {
        assert_eq!(escaped(".fi -x \\"), "\\&.fi \\-x \\e");
    }
}
