/** @file The pictures waiting to be sent: dropped, pasted, chosen, photographed. */

import { announce, byId, make, makeButton } from "./dom.js";

/**
 * @typedef {object} Picture
 * @property {string} name
 * @property {string} shown a blob: URL for thumbnails
 * @property {Promise<string>} sent the file as a `data:` URL
 */

/** The pictures of the message being written. */
export class PendingPictures {
  /**
   * @param {(text: string) => void} complain shows why something was not added
   * @param {HTMLElement} next what gets the focus when the last picture is removed
   */
  constructor(complain, next) {
    /** @type {Picture[]} */
    this.pictures = [];
    /** How many pictures may still be added; the app lowers it as the chat grows. */
    this.room = Infinity;
    this.list = byId("pending", HTMLUListElement);
    this.complain = complain;
    this.next = next;
    this.#takeFiles();
    this.#takePaste();
    this.#takeDrop();
  }

  /**
   * Adds the files that are pictures, and says which are not.
   * @param {Iterable<File>} files
   */
  add(files) {
    const refused = [];
    let full = false;
    let added = 0;
    for (const file of files) {
      if (!file.type.startsWith("image/") || file.type === "image/svg+xml") refused.push(file.name);
      else if (this.pictures.length >= this.room) full = true;
      else {
        const picture = { name: file.name, shown: URL.createObjectURL(file), sent: dataUrl(file) };
        picture.sent.catch(() => this.complain(`${file.name} cannot be read.`));
        this.pictures.push(picture);
        added += 1;
      }
    }
    if (refused.length) this.complain(`Not a picture that can be sent: ${refused.join(", ")}.`);
    else if (full) this.complain("The model takes no more pictures in one chat. Start a new chat to send others.");
    else this.complain("");
    this.#draw();
    if (added) announce(`${this.pictures.length} to send.`);
  }

  /** Hands the pictures over and forgets them. */
  take() {
    const pictures = this.pictures;
    this.pictures = [];
    this.#draw();
    return pictures;
  }

  #draw() {
    this.list.replaceChildren(
      ...this.pictures.map((picture, index) =>
        make(
          "li",
          {},
          thumbnail(picture),
          makeButton("×", () => this.#remove(index), { "aria-label": `Remove ${picture.name}`, title: "Remove" }),
        ),
      ),
    );
  }

  /** @param {number} index */
  #remove(index) {
    URL.revokeObjectURL(this.pictures[index].shown);
    this.pictures.splice(index, 1);
    this.#draw();
    const buttons = this.list.querySelectorAll("button");
    (buttons[Math.min(index, buttons.length - 1)] ?? this.next).focus();
  }

  #takeFiles() {
    const input = byId("files", HTMLInputElement);
    byId("add-files", HTMLButtonElement).addEventListener("click", () => input.click());
    input.addEventListener("change", () => {
      this.add(input.files ?? []);
      input.value = ""; // So that the same file can be chosen again.
      this.next.focus();
    });
  }

  #takePaste() {
    document.addEventListener("paste", (event) => {
      const files = event.clipboardData?.files ?? [];
      if (!files.length) return;
      event.preventDefault();
      this.add(files);
      this.next.focus();
    });
  }

  #takeDrop() {
    // Entering a child leaves its parent: only the balance says whether the pointer is still over the page.
    let inside = 0;
    const holdsFiles = (/** @type {DragEvent} */ event) => event.dataTransfer?.types.includes("Files") ?? false;
    const show = () => document.body.classList.toggle("dropping", inside > 0);
    addEventListener("dragenter", (event) => {
      if (!holdsFiles(event)) return;
      inside += 1;
      show();
    });
    addEventListener("dragleave", (event) => {
      if (!holdsFiles(event)) return;
      inside -= 1;
      show();
    });
    addEventListener("dragover", (event) => {
      if (holdsFiles(event)) event.preventDefault();
    });
    addEventListener("drop", (event) => {
      if (!event.dataTransfer || !holdsFiles(event)) return;
      event.preventDefault();
      inside = 0;
      show();
      this.add(event.dataTransfer.files);
      this.next.focus();
    });
  }
}

/**
 * Shows a picture small; a format that the browser does not draw shows its name.
 * @param {Picture} picture
 */
export function thumbnail(picture) {
  const image = make("img", { src: picture.shown, alt: picture.name, title: picture.name });
  image.addEventListener("error", () => image.replaceWith(make("span", { class: "no-preview" }, picture.name)));
  return image;
}

/**
 * @param {Blob} file
 * @returns {Promise<string>}
 */
function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(String(reader.result)));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}
